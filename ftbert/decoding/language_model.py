"""The part of Model that continues texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from ftbert.decoding.messages import Prompt, listed
from ftbert.decoding.options import Options
from ftbert.decoding.texts import TextPieces, generate, generate_ids
from ftbert.decoding.words import (
    ANSWERS,
    ANSWERS_OF_IDS,
    SAME,
    SAME_OF_IDS,
    SAME_OF_STREAM,
    more_options,
)
from ftbert.forked import note_fork
from ftbert.keywords import keywords
from ftbert.packed_model import PackedModel


class LanguageModel(PackedModel):
    """What `ftbert.Model` inherits."""

    @keywords(SAME, ANSWERS, passed_to=more_options)
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        min_new_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        chat: bool = False,
        chat_template: str | None = None,
        batch_size: int = 8,
        **others: Any,
    ) -> list[str]:
        """The text that follows each prompt, in input order; of a single one a list of one. A prompt is a str, or a
        conversation: a list of messages {"role": ..., "content": ...}, whose answer the text is; it goes on where the
        last message is the assistant's.

        A text ends at a token that the folder's generation_config.json or config.json names as its end, before a stop
        string, after max_new_tokens, or where the model's context is full.

        max_new_tokens, stop, repetition_penalty, min_new_tokens and others: None is generation_config.json's value,
        else 256 for max_new_tokens and no rule; its values for drawing have no effect. temperature: what logits are
        divided by before a token is drawn; 0: always the most likely one. top_k: drawn from the most likely k alone, 0
        from all; top_p: from the fewest that together are at least as likely as top_p; min_p: from those at least min_p
        times as likely as the most likely one. repetition_penalty: of tokens that the prompt or the text holds, logits
        above 0 are divided by it, others multiplied; 1: none. presence_penalty, frequency_penalty: subtracted from the
        logits of generated tokens, once and each time, as OpenAI has them. min_new_tokens: no end before so many. seed:
        the same draws each time; the prompt at place i draws as one alone with seed + i. stop: a text ends before the
        first of these. chat: a prompt is a user's message in the tokenizer's chat template, and the text its answer.
        chat_template: another template, in Jinja. batch_size: texts computed at a time, for each of which the cache of
        keys and values has room. others: min_length, no_repeat_ngram_size, bad_words_ids, sequence_bias,
        suppress_tokens, begin_suppress_tokens, logit_bias (ids and what is added to their logits), ignore_eos (no token
        ends the text), and do_sample where it says what the temperature does.

        Names mean what they mean in transformers' generate, and greedy texts are its texts. ValueError for an option's
        value (also of generation_config.json), a model without a head for the next token, an empty prompt or one longer
        than the context, a live model, which has no tokenizer (see generate_ids); TypeError for a prompt that is
        neither a text nor messages, and for an unknown argument; RuntimeError for a model that reads in both
        directions, and where logits are not finite.
        """
        note_fork()
        options = Options.of(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, min_new_tokens=min_new_tokens,
            frequency_penalty=frequency_penalty, stop=stop, chat=chat, chat_template=chat_template,
            batch_size=batch_size, **more_options(**others),
        )  # fmt: skip
        return generate(self, listed(prompts), options)

    @keywords(SAME_OF_STREAM, ANSWERS, passed_to=more_options)
    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        min_new_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        chat: bool = False,
        chat_template: str | None = None,
        **others: Any,
    ) -> TextPieces:
        """The text of `generate` while it comes, an iterator of str: never half a character, nor part of a stop string.
        Its tokens, prompt_tokens and reason say how far it is and why it ended. Raises what generate does, at once."""
        note_fork()
        options = Options.of(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, min_new_tokens=min_new_tokens,
            frequency_penalty=frequency_penalty, stop=stop, chat=chat, chat_template=chat_template,
            **more_options(**others),
        )  # fmt: skip
        return TextPieces(self, prompt, options)

    @keywords(SAME_OF_IDS, ANSWERS_OF_IDS, passed_to=more_options)
    def generate_ids(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        min_new_tokens: int | None = None,
        seed: int | None = None,
        batch_size: int = 8,
        **others: Any,
    ) -> list[list[int]]:
        """`generate` of token ids: those that follow each prompt's, without the one that ends a text. Needs no
        tokenizer, and so knows no stop strings. Ids are int, or integers of numpy and torch; TypeError for others."""
        note_fork()
        rows: list[Any] = [[index(one) for one in ids] for ids in prompts]
        options = Options.of(
            max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, min_new_tokens=min_new_tokens,
            frequency_penalty=frequency_penalty, batch_size=batch_size, **more_options(**others),
        )  # fmt: skip
        return generate_ids(self, rows, options)
