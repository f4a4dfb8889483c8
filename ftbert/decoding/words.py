"""Arguments of others' generate: words of transformers, vLLM, OpenAI and llama.cpp, taken where they mean the same,
else answered with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftbert.decoding.stated import read_rules
from ftbert.keywords import Answer
from ftbert.packed_model import PackedModel


def more_options(
    *,
    do_sample: bool | None = None,
    min_length: int | None = None,
    no_repeat_ngram_size: int | None = None,
    bad_words_ids: Sequence[Sequence[int]] | None = None,
    sequence_bias: Any = None,
    suppress_tokens: Sequence[int] | None = None,
    begin_suppress_tokens: Sequence[int] | None = None,
    logit_bias: Mapping[int, float] | None = None,
    ignore_eos: bool | None = None,
) -> dict[str, Any]:
    """Options of `generate` that mean what they mean in transformers and generation_config.json, logit_bias of OpenAI's
    and ignore_eos of vLLM's -> arguments of `Options.of`. ValueError for a value of another kind."""
    rules = {
        "min_length": min_length, "no_repeat_ngram_size": no_repeat_ngram_size, "bad_words_ids": bad_words_ids,
        "sequence_bias": sequence_bias, "suppress_tokens": suppress_tokens,
        "begin_suppress_tokens": begin_suppress_tokens,
    }  # fmt: skip
    own = {"do_sample": do_sample, "logit_bias": logit_bias, "ignore_eos": ignore_eos}
    return {**own, **read_rules(rules, "generate")}


def check_do_sample(value: Any, temperature: float) -> None:
    """ValueError where it says other than the temperature, which alone decides whether tokens are drawn."""
    if value and not temperature:
        raise ValueError(
            f"do_sample={value!r}: pass temperature too: 1.0 draws by the model's own probabilities (transformers' "
            "defaults are temperature=1.0, top_k=50)"
        )
    if value is not None and not value and temperature:
        raise ValueError(f"do_sample={value!r}: leave temperature={temperature!r} out to take the most likely tokens")


def _only(allowed: Any, answer: str) -> Callable[[Any, Any], None]:
    """An answer to all values but None and the one that asks for nothing."""

    def check(model: PackedModel, value: Any) -> None:
        if value is not None and value != allowed:
            raise TypeError(f"{answer}; got {value!r}")

    return check


def _without_effect(model: PackedModel, value: Any) -> None:
    pass


_OPTIONS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_TEXTS = {**_OPTIONS, "stop_strings": "stop"}
SAME = {**_TEXTS, "messages": "prompts", "prompt": "prompts", "texts": "prompts"}
SAME_OF_STREAM = {**_TEXTS, "messages": "prompt", "text": "prompt"}
SAME_OF_IDS = _OPTIONS

_DRAW = "temperature above 0 draws, 0 takes the most likely token"
_SCORES = "model(ids, mask).logits has the logits of all positions"
_PADDED = "texts go to generate as texts, ids to generate_ids as lists without padding"
_ALL_TOKENS = "repetition_penalty=... counts all tokens of prompt and text, llama.cpp's the last 64"
ANSWERS: dict[str, Answer] = {
    "max_length": "max_new_tokens=... counts the generated tokens; max_length also those of the prompt",
    "num_beams": _only(1, f"generate has no beams: {_DRAW}"),
    "num_return_sequences": _only(1, "generate: give the prompt so many times, with a temperature"),
    "n": _only(1, "generate: give the prompt so many times, with a temperature"),
    "use_cache": _only(True, "generate always has its cache"),
    "pad_token_id": _without_effect, "early_stopping": _without_effect, "renormalize_logits": _without_effect,
    "repeat_penalty": _ALL_TOKENS, "repeat_last_n": _ALL_TOKENS, "penalty_last_n": _ALL_TOKENS,
    "eos_token_id": "stop=... takes its spelling; generation_config.json names the ends of all texts",
    "generation_config": "its entries are arguments; the folder's generation_config.json counts without",
    "streamer": "stream(prompt) is an iterator of the text's pieces",
    "stream": "stream(prompt) is an iterator of the text's pieces",
    "inputs": _PADDED, "input_ids": _PADDED, "attention_mask": _PADDED, "inputs_embeds": _PADDED,
    "tokenizer": "the folder's is used, model.tokenizer",
    "output_scores": _SCORES, "output_logits": _SCORES, "return_dict_in_generate": _SCORES, "logprobs": _SCORES,
    "logits_processor": "repetition_penalty and its kin are computed on the device, others are not",
    "stopping_criteria": "stop=..., or a loop over stream(prompt) that ends",
    "skip_special_tokens": _only(True, "generate gives texts without special tokens, generate_ids all tokens"),
    "return_full_text": "the generated text alone is given; put the prompt before it",
    "typical_p": "top_p=... and min_p=... leave unlikely tokens out",
    "n_ctx": "the context is the model's; max_new_tokens=... bounds the text",
    "n_gpu_layers": "ftbert.load(folder, device='cuda') puts all layers there",
    "device": "ftbert.load(folder, device=...)",
    "tools": "a template that takes them makes a text of them: model.tokenizer.apply_chat_template(..., tools=...)",
}  # fmt: skip
_NO_TEXT = "generate_ids takes and gives ids; generate(texts) knows texts and conversations"
ANSWERS_OF_IDS: dict[str, Answer] = {
    **ANSWERS, "stop": _NO_TEXT, "stop_strings": _NO_TEXT, "chat": _NO_TEXT, "chat_template": _NO_TEXT,
    "messages": _NO_TEXT,
}  # fmt: skip
