"""The part of Model that has sentence-transformers' names for settings, sizes and ids, and answers its other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftbert.keywords import keywords
from ftbert.packed_model import PackedModel
from ftbert.text.checks import one_of, positive
from ftbert.text.elsewhere import ELSEWHERE, answer
from ftbert.text.encoding import text_options, tokenizer_of, users_tokenizer
from ftbert.text.late_chunks import split
from ftbert.text.late_interaction import compares_tokens, max_sim, max_sim_pairwise
from ftbert.text.multi_vector import multi_vector_embedding
from ftbert.text.options import choose_prompt
from ftbert.text.scoring import gives_scores, task_of
from ftbert.text.settings import SIMILARITIES, TOKEN_SIMILARITIES, check_prompts
from ftbert.text.similarity import similarity, similarity_pairwise
from ftbert.text.tokens import check_texts, has_pairs, is_single, listed

EMBEDDINGS = {"embeddings1": "one", "embeddings2": "other"}


class SentenceNames(PackedModel):
    """What `TextModel` inherits."""

    text_choices: Mapping[str, Any] = {}

    def _choose(self, **settings: Any) -> None:
        """Settings over the folder's, for all calls that follow. ValueError, TypeError."""
        self.text_choices = {**self.text_choices, **settings}

    def take_settings(self, prompts: Mapping[str, str] | None, **settings: Any) -> None:
        """Those of `load`: prompts are added to the folder's, settings that are not None are set by their names."""
        if prompts is not None:
            self.prompts = {**self.prompts, **prompts}
        for name, value in settings.items():
            if value is not None:
                setattr(self, name, value)

    @property
    def max_seq_length(self) -> int:
        """Tokens of a text, special ones included, that are read where a call names no `max_length`; of a model for
        scores, of a text or pair. Settable: the rest is truncated. None: the folder's."""
        return tokenizer_of(self, scores=gives_scores(self)).max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        if value is None:
            self.text_choices = {name: one for name, one in self.text_choices.items() if name != "max_length"}
        else:
            tokenizer = tokenizer_of(self, scores=gives_scores(self))
            self._choose(max_length=tokenizer.check_length(positive("max_seq_length", value), "max_seq_length"))

    max_length = max_seq_length  # CrossEncoder's name

    def get_max_seq_length(self) -> int:
        """`max_seq_length`."""
        return self.max_seq_length

    @property
    def truncate_dim(self) -> int | None:
        """Entries kept of a vector where a call names no `truncate_dim`. Settable; None: all of them."""
        settings = self.text_choices if self.folder is None else vars(tokenizer_of(self).settings)
        return settings.get("truncate_dim")

    @truncate_dim.setter
    def truncate_dim(self, value: int | None) -> None:
        self._choose(truncate_dim=None if value is None else positive("truncate_dim", value))

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """A context in which `truncate_dim` is another one, for all threads."""
        before = self.text_choices
        self.truncate_dim = truncate_dim
        try:
            yield
        finally:
            self.text_choices = before

    truncate_sentence_embeddings = truncate_embeddings  # its older name

    def get_embedding_dimension(self) -> int:
        """Entries of a vector of `encode`; of a model of sparse vectors or of one for each token, of these."""
        if self.folder is None:
            return min(self.config.hidden, self.truncate_dim or self.config.hidden)
        settings = tokenizer_of(self).settings
        if settings.other:
            return int(self.config.vocab if settings.sparse else multi_vector_embedding(self).width)
        return text_options(self).width

    def get_sentence_embedding_dimension(self) -> int:
        """`get_embedding_dimension` by its older name."""
        return self.get_embedding_dimension()

    @property
    def num_labels(self) -> int:
        """How many scores `predict` gives a text or pair. ValueError for a model that gives none."""
        return task_of(self)[1]

    @property
    def prompts(self) -> Mapping[str, str]:
        """By name, as the folder's config_sentence_transformers.json has them. Settable."""
        return tokenizer_of(self, scores=gives_scores(self)).settings.prompts

    @prompts.setter
    def prompts(self, value: Mapping[str, str]) -> None:
        self._choose(prompts=check_prompts("prompts", value))

    @property
    def default_prompt_name(self) -> str | None:
        """Of the prompt that is put before every text where a call names none. Settable."""
        return tokenizer_of(self, scores=gives_scores(self)).settings.default_prompt_name

    @default_prompt_name.setter
    def default_prompt_name(self, value: str | None) -> None:
        if value is not None:
            choose_prompt(None, value, self.prompts, "")
        self._choose(default_prompt_name=value)

    @property
    def similarity_fn_name(self) -> str:
        """"cosine", "dot", "euclidean" or "manhattan": the folder's (else dot for sparse vectors, cosine for others)
        or what is set; None: the folder's. Of vectors of tokens "maxsim" or "meanmaxsim"."""
        if (chosen := self.text_choices.get("similarity")) is not None:
            return str(chosen)
        return "cosine" if self.folder is None else tokenizer_of(self).settings.similarity

    @similarity_fn_name.setter
    def similarity_fn_name(self, value: Any) -> None:
        kept = {name: one for name, one in self.text_choices.items() if name != "similarity"}
        value = getattr(value, "value", value)  # a SimilarityFunction of sentence-transformers
        if value is not None:
            known = TOKEN_SIMILARITIES if compares_tokens(self) else SIMILARITIES
            kept["similarity"] = one_of(known, "similarity_fn_name", value)
        self.text_choices = kept

    @keywords(EMBEDDINGS)
    def similarity(self, one: Any, other: Any) -> Tensor:
        """[n, width] and [m, width] -> [n, m] by `similarity_fn_name` (distances are negative).

        Of a folder for one vector a token (ColBERT) lists of [tokens, width], queries and documents: the sum over a
        query's tokens of the largest product with one of the document's, float32 [n, m]. Vectors of float16, bfloat16
        or int8 on both sides are multiplied as they are.
        """
        name = self.similarity_fn_name
        return (max_sim if name in TOKEN_SIMILARITIES else similarity)(one, other, name)

    @keywords(EMBEDDINGS)
    def similarity_pairwise(self, one: Any, other: Any) -> Tensor:
        """[n, width] twice -> [n]: row by row; of lists of [tokens, width] each query with the document in its
        place."""
        name = self.similarity_fn_name
        return (max_sim_pairwise if name in TOKEN_SIMILARITIES else similarity_pairwise)(one, other, name)

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the folder: a copy, since padding and truncation are its state, and encode's own
        must stay without them. Its model_max_length is `max_seq_length`. ValueError for a model without a folder."""
        return users_tokenizer(self, scores=gives_scores(self))

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        raise AttributeError("tokenizer cannot be set: ftbert reads the files of the folder; save the other one there")

    @property
    def processor(self) -> Any:
        """`tokenizer`, which sentence-transformers calls so where a model reads more than text."""
        return self.tokenizer

    def preprocess(
        self, inputs: str | Iterable[Any], prompt: str | None = None, *, max_length: int | None = None
    ) -> dict[str, Tensor]:
        """Texts or pairs -> input_ids, attention_mask and, where the model has them, token_type_ids: int64 [n, longest]
        on the CPU, padded on the tokenizer's side. The ids are those that `encode` and `predict` compute, where no chat
        template is; a call of the model takes them: model(**model.preprocess(texts)).

        prompt: put before every text. max_length: tokens of a text; None: `max_seq_length`. TypeError, ValueError as of
        `encode`.
        """
        given: Sequence[Any] = [inputs] if is_single(inputs) else listed(inputs, pairs=True)
        check_texts(given, pairs=True)
        scores = gives_scores(self)
        tokenizer, loaded = tokenizer_of(self, scores=scores), users_tokenizer(self, scores=scores)
        length = None if max_length is None else positive("max_length", max_length)
        length = tokenizer.check_length(length or tokenizer.max_length, "max_length", has_pairs(given))
        found = tokenizer.tokens(given, choose_prompt(prompt, None, {}, ""), length)
        found = found.check(self.config.vocab, self.config.token_types)
        rows = {"input_ids": found.rows()}
        if "token_type_ids" in loaded.model_input_names:
            rows["token_type_ids"] = found.type_rows()
        rows["attention_mask"] = [np.ones(len(row), dtype=np.int64) for row in rows["input_ids"]]
        fill = {"input_ids": loaded.pad_token_id or 0, "token_type_ids": loaded.pad_token_type_id}
        return {name: _padded(some, fill.get(name, 0), loaded.padding_side) for name, some in rows.items()}

    def tokenize(self, texts: str | Iterable[Any], **options: Any) -> dict[str, Tensor]:
        """`preprocess` by its older name."""
        return self.preprocess(texts, **options)

    def chunk_spans(self, texts: str | Iterable[str], chunk_tokens: int) -> Any:
        """The spans of `encode(texts, chunk_tokens=...)`: for each text a list of (start, end) in characters, without
        gaps, each of so many tokens but the last. Of a single str its own list."""
        given = [texts] if isinstance(texts, str) else listed(texts)
        check_texts(given)
        found = split(tokenizer_of(self), given, positive("chunk_tokens", chunk_tokens))
        return found[0] if isinstance(texts, str) else found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ELSEWHERE:  # it would change nothing
            raise answer(self, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self), name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)  # whose own AttributeError brought us here, and is the one to see
        raise answer(self, name)


def _padded(rows: list[Any], fill: int, side: str) -> Tensor:
    """int64 [rows, longest]."""
    made = torch.full((len(rows), max(map(len, rows), default=0)), fill, dtype=torch.int64)
    for place, row in enumerate(rows):
        here = slice(made.shape[1] - len(row), None) if side == "left" else slice(len(row))
        made[place, here] = torch.from_numpy(np.asarray(row, dtype=np.int64))
    return made
