"""Shapes of requests that generate text, and of their answers."""

from __future__ import annotations

from typing import Any

import msgspec

from ftbert.server.schemas import ONLY, answer, many

Stop = str | list[str] | None


class Drawing(msgspec.Struct, kw_only=True):
    """OpenAI's and vLLM's names. temperature: without it 1; 0: always the most likely token. n: texts of each prompt.
    logit_bias: by token ids. stop: at most 16 strings. ignore_eos: no token ends the text."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Stop = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Completion(Drawing, kw_only=True):
    """prompt: a text, ids, or a list of either. logprobs: of so many tokens beside each chosen one."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """role: as the model's template knows them."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class ChatCompletion(Drawing, kw_only=True):
    """Where the last message is the assistant's, the text continues it. chat_template_kwargs: for the model's
    template, as {"enable_thinking": false}."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class LlamaCompletion(msgspec.Struct, kw_only=True):
    """llama.cpp's names. n_predict: -1: as many as fit. n_probs: tokens beside each chosen one. seed: -1: another text
    each time."""

    prompt: str | list[int]
    model: str | None = None
    n_predict: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1
    stop: list[str] = []
    logit_bias: dict[int, float] | list[tuple[int, float | bool]] = {}
    ignore_eos: bool = False
    n_probs: int = 0
    return_tokens: bool = False
    stream: bool = False


class OllamaDrawing(msgspec.Struct, kw_only=True):
    num_predict: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Stop = None
    mirostat: int = 0
    typical_p: float = 1.0
    tfs_z: float = 1.0


class OllamaGenerate(msgspec.Struct, kw_only=True):
    """raw: without the model's template. stream: without it true."""

    model: str | None = None
    prompt: str = ""
    system: str = ""
    raw: bool = False
    stream: bool = True
    options: OllamaDrawing = msgspec.field(default_factory=OllamaDrawing)


class OllamaMessage(msgspec.Struct):
    role: str
    content: str = ""
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None


class OllamaChat(msgspec.Struct, kw_only=True):
    model: str | None = None
    messages: list[OllamaMessage] = []
    stream: bool = True
    options: OllamaDrawing = msgspec.field(default_factory=OllamaDrawing)


# Fields that would change the text and are not computed, and the values that change nothing; see ONLY.
_FORMS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "use_beam_search": (False,), "length_penalty": (1,), "stop_token_ids": ([],), "bad_words": ([],),
    "allowed_token_ids": (), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (), "prompt_logprobs": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "logits_processors": ([],), "prompt_embeds": (),
}  # fmt: skip
_OF_CHATS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "documents": ([],),
    "chat_template": (), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "reasoning_effort": ("none",), "add_special_tokens": (False,),
}  # fmt: skip
_OF_OLLAMA: dict[str, tuple[Any, ...]] = {
    "format": ("",), "images": ([],), "suffix": ("",), "template": ("",), "context": ([],), "tools": ([],),
    "think": (False,), "logprobs": (False,),
}  # fmt: skip
ONLY.update(
    {
        Completion: _FORMS,
        ChatCompletion: {**_FORMS, **_OF_CHATS},
        LlamaCompletion: {
            "grammar": ("",), "json_schema": ({},), "image_data": ([],), "multimodal_data": ([],), "n": (1,),
            "lora": ([],), "n_indent": (0,), "typical_p": (1,), "mirostat": (0,), "dry_multiplier": (0,),
            "xtc_probability": (0,), "dynatemp_range": (0,), "top_n_sigma": (-1, 0), "n_cmpl": (1,),
        },
        OllamaGenerate: _OF_OLLAMA,
        OllamaChat: _OF_OLLAMA,
    }
)  # fmt: skip


# ---- answers, for /openapi.json

UsageOfTexts = answer(
    "UsageOfTexts", "prompt_tokens_details: cached_tokens were there from an earlier text.",
    prompt_tokens=int, completion_tokens=int, total_tokens=int, prompt_tokens_details=dict[str, int],
)  # fmt: skip
CompletionChoice = answer(
    "CompletionChoice", index=int, text=str, logprobs=dict[str, Any] | None, finish_reason=str | None
)
Completed = answer(
    "Completed", "Streamed: an event of this shape for each piece.",
    id=str, object=str, created=int, model=str, choices=many(CompletionChoice), usage=UsageOfTexts,
)  # fmt: skip
ChatChoice = answer(
    "ChatChoice", index=int, message=dict[str, Any], logprobs=dict[str, Any] | None, finish_reason=str | None
)
ChatCompleted = answer(
    "ChatCompleted", "Streamed: events with `delta` in the place of `message`.",
    id=str, object=str, created=int, model=str, choices=many(ChatChoice), usage=UsageOfTexts,
)  # fmt: skip
