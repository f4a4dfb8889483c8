"""The part of Model that takes text: encode, predict, rerank and their kin, by the names of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ftbert.keywords import keywords
from ftbert.text.computing import compute_all
from ftbert.text.elsewhere import ARGUMENTS, ARGUMENTS_OF_TOKENS, INPUTS
from ftbert.text.encoding import embedding, text_options, tokenizer_of
from ftbert.text.entities import predict_entities
from ftbert.text.late_chunks import chunk_embedding, spanned
from ftbert.text.late_interaction import compares_tokens, rerank_tokens
from ftbert.text.multi_vector import multi_vector_embedding
from ftbert.text.outputs import VECTORS, as_asked, check_output, every_output, on_device
from ftbert.text.precision import check_ranges, quantized
from ftbert.text.scoring import labels_of, predict, rank, scoring, task_of, to_rank, token_classify
from ftbert.text.sentence_names import SentenceNames
from ftbert.text.sparse import as_tensor, sparse_embedding
from ftbert.text.tasks import adapter_for
from ftbert.text.token_classification import IGNORED
from ftbert.text.tokens import check_texts, has_pairs, is_single, listed
from ftbert.text.workers import CallersThread, Job, Launch, Result, Workers


class TextModel(SentenceNames):
    """What `ftbert.Model` inherits."""

    def workers(self, launch: Launch[Job, Result]) -> Workers[Job, Result]:
        """Who computes jobs of this model: `launch(replica, job)` starts one, and what it returns waits for the result.
        Each call of `encode` and its kin enters workers of its own."""
        return CallersThread(self, launch)

    @keywords(INPUTS, ARGUMENTS)
    def encode(
        self,
        texts: str | Iterable[str],
        *,
        normalize: bool | None = True,
        normalize_embeddings: bool | None = None,
        pooling: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        truncate_dim: int | None = None,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        output_value: str | None = "sentence_embedding",
        long_texts: str = "truncate",
        precision: str = "float32",
        ranges: Any = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = None,
        task: str | None = None,
        chunks: Any = None,
        chunk_tokens: int | None = None,
    ) -> Any:
        """Texts -> float32 numpy [n, width], in input order; [width] for a single str. width is hidden, or what the
        folder's Dense modules make of it, or truncate_dim.

        Texts are a list, a column (of pandas, pyarrow, polars, numpy) or an iterator, which is read to its end first.

        Names mean what they mean in sentence-transformers. What differs: vectors are normalised unless told otherwise,
        `batch_size` has no default since `max_tokens` bounds a batch, all but `texts` is given by name, and None shows
        the progress bar on a terminal.

        normalize: to length 1 (default), the bare pooled vector (False), or as the folder's modules say (None).
        normalize_embeddings: sentence-transformers' spelling: True is normalize=True, False is normalize=None, as
        there the folder's modules still count.
        pooling: "cls", "mean", "max", "mean_sqrt_len", "weightedmean", "last", or several as "cls+mean", one after the
        other; None: the folder's. Its Dense modules come after it.
        prompt: put before every text; prompt_name: one of `prompts`. Without both: the folder's default prompt. Where
        the folder's pooling says include_prompt false, the prompt's tokens are not pooled.
        max_length: tokens of a text with the special ones; None: the folder's.
        long_texts: what is longer is truncated ("truncate"), or cut into windows of max_length tokens, each with the
        prompt and the special tokens, whose pooled vectors are averaged by their numbers of own tokens before anything
        is normalised or truncated ("mean"). The logger "ftbert" is told how many texts were longer.
        truncate_dim: entries kept of a vector, before it is normalised; None: the folder's.
        batch_size, max_tokens: most texts and real tokens computed at once; memory grows with them. A text of more
        tokens goes alone.
        output_value: "token_embeddings" gives for each text the last hidden state of its tokens instead, special ones
        and prompt included, float32 [tokens, hidden], in a list; nothing of it is pooled, normalised or shortened. Of a
        folder for one vector a token (ColBERT) these are its vectors: see encode_multi_vector. None gives a dict of
        tensors for each text: input_ids, attention_mask, token_type_ids where the tokenizer has them, token_embeddings
        and sentence_embedding, as sentence-transformers but without its padding.
        precision: "float32", or "int8", "uint8", "binary", "ubinary", as in sentence-transformers: int8 and uint8
        spread each entry's range over the vectors of the call or `ranges`, float [2, width], the least and the greatest
        of each entry (what lies outside becomes the nearest); the others pack eight signs into a byte.
        convert_to_tensor: a torch tensor on the model's device; convert_to_numpy=False alone: a list of them.
        task: "query" or "document": their prompt and length, as encode_query and encode_document; or one of the model's
        own tasks (jina-embeddings-v3 and v5), whose adapter is merged when it is first asked for and kept, with the
        task's prompt. None: the weights without an adapter, or with that of `load(task=)`.
        chunks, chunk_tokens: late chunking. A list of float32 [spans, width], one for each text, whose tokens see all
        of it (of what is longer than the model reads, windows that overlap by a quarter); a span is pooled as a text.
        chunks: for each text the spans, (start, end) in characters; a token is of the span in which it ends, special
        ones of that with the text's beginning or end. chunk_tokens: tokens of a span, as `chunk_spans` cuts them.

        TypeError for an item that is not a str; ValueError for an option's value, a lone surrogate, a model without a
        usable tokenizer, a folder that asks for what ftbert does not do (the message names the file), or that is for
        sparse vectors or one for each token. Warns once of a model that scores texts: `predict` and `rerank` are for
        it.
        """
        if normalize_embeddings is not None:
            if normalize is not True:
                raise TypeError("give normalize or normalize_embeddings, not both")
            normalize = True if normalize_embeddings else None
        tokens = check_output(output_value, long_texts, precision)
        if tokens and (settings := tokenizer_of(self).settings).other and settings.multi is not None:
            return self.encode_multi_vector(
                texts, prompt=prompt, prompt_name=prompt_name, max_length=max_length, batch_size=batch_size,
                max_tokens=max_tokens, convert_to_numpy=convert_to_numpy, convert_to_tensor=convert_to_tensor,
                show_progress_bar=show_progress_bar, task=task,
            )  # fmt: skip
        asked: dict[str, Any] = {
            "normalize": normalize, "pooling": pooling, "prompt": prompt, "prompt_name": prompt_name,
            "max_length": max_length, "truncate_dim": truncate_dim, "batch_size": batch_size, "max_tokens": max_tokens,
            "task": task,
        }  # fmt: skip
        model = self.for_task(adapter_for(self, task))
        given, single = [texts] if isinstance(texts, str) else listed(texts), isinstance(texts, str)
        if chunks is not None or chunk_tokens is not None:
            if output_value != VECTORS or precision != "float32" or long_texts != "truncate":
                raise ValueError("chunks go with vectors of texts in float32; their windows stand in for long_texts")
            spans = [chunks] if single and chunks is not None else chunks
            found = compute_all(
                model, spanned(self, given, spans, chunk_tokens), chunk_embedding(self, **asked), show_progress_bar
            )
            return as_asked(found[0] if single else found, self.device, convert_to_numpy, convert_to_tensor, single)
        how = text_options(self, **asked, long_texts=long_texts)
        ranges = None if ranges is None else check_ranges(ranges, precision, how.width)
        check_texts(given)
        work = embedding(self, how, tokens) if output_value is not None else every_output(self, how)
        found = compute_all(model, given, work, show_progress_bar)
        if output_value is None:
            return on_device(found[0] if single else found, self.device)
        found = found if tokens else quantized(found, precision, ranges)
        return as_asked(found[0] if single else found, self.device, convert_to_numpy, convert_to_tensor, single)

    @keywords(INPUTS, ARGUMENTS)
    def encode_sparse(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        max_active_dims: int | None = None,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = False,
        show_progress_bar: bool | None = None,
        task: str | None = None,
    ) -> Any:
        """Texts -> a float32 tensor [n, vocab] on the model's device, sparse (COO); [vocab] for a single str.

        As sentence-transformers' SparseEncoder.encode: an entry is the weight of a token of the vocabulary in the text.
        SPLADE's come of the masked language model's head; those of a folder with sparse_linear.pt (BGE-M3) are the
        largest weight of each token that the text has, special ones apart. A masked language model without modules.json
        counts as SPLADE.

        max_active_dims: so many entries at most, the largest. convert_to_sparse_tensor: False gives zeros, too.
        convert_to_tensor: False gives a list of rows. save_to_cpu: leave the result there. prompt, prompt_name,
        max_length, batch_size, max_tokens, show_progress_bar, task: as in `encode`. ValueError for a
        model that gives no such vectors.
        """
        work = sparse_embedding(
            self, prompt=prompt, prompt_name=prompt_name, max_length=max_length, max_active_dims=max_active_dims,
            batch_size=batch_size, max_tokens=max_tokens, task=task,
        )  # fmt: skip
        given = [texts] if isinstance(texts, str) else listed(texts)
        check_texts(given)
        found = as_tensor(compute_all(self, given, work, show_progress_bar), work.width)
        found = found if convert_to_sparse_tensor else found.to_dense()
        found = found if save_to_cpu else found.to(self.device)
        if isinstance(texts, str):
            return found[0]
        return found if convert_to_tensor else [found[place] for place in range(len(found))]

    @keywords(INPUTS, ARGUMENTS_OF_TOKENS)
    def encode_multi_vector(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = None,
        task: str | None = None,
    ) -> Any:
        """Texts -> a list of float32 numpy [tokens, width], one vector for each token; an array for a single str.

        As sentence-transformers' MultiVectorEncoder.encode: the folder's Dense and Normalize make them of the last
        hidden state, and tokens that its skiplist names have none. Of a folder with colbert_linear.pt (BGE-M3) all
        tokens but the first have one. `similarity` and `rerank` score by them.

        task: "query" or "document", with their prompt and length, as encode_query(...,
        output_value="token_embeddings"); None counts as a document without prompt. The others: as in `encode`.
        Where the folder makes queries longer, the tokens behind them have vectors, too. ValueError for a model that
        gives no such vectors.
        """
        work = multi_vector_embedding(
            self, prompt=prompt, prompt_name=prompt_name, max_length=max_length, batch_size=batch_size,
            max_tokens=max_tokens, task=task,
        )  # fmt: skip
        given = [texts] if isinstance(texts, str) else listed(texts)
        check_texts(given)
        found = compute_all(self, given, work, show_progress_bar)
        single = isinstance(texts, str)
        return as_asked(found[0] if single else found, self.device, convert_to_numpy, convert_to_tensor, single)

    @keywords({**INPUTS, "activation_fct": "activation_fn"}, ARGUMENTS)
    def predict(
        self,
        texts: str | tuple[str, str] | Iterable[str | Sequence[str]],
        *,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        apply_softmax: bool = False,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        chat_template: str | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = None,
    ) -> Any:
        """The head's scores of texts, or of pairs of texts, in input order, float32.

        Sequence classification: numpy [n, labels], [n] where there is one label. Token classification: a list of
        [tokens, labels], special tokens included. What a label is called: `id2label`. A str, or a tuple of two, is one
        text or one pair, and gives one row.

        Names mean what they mean in sentence-transformers' CrossEncoder.predict. What differs: a list of two str is two
        texts, not one pair; `batch_size` has no default since `max_tokens` bounds a batch; all but `texts` is given by
        name. transformers' text-classification pipeline applies softmax to several labels, this does not unless told.

        activation_fn: over the float32 logits [rows, labels]; None: the folder's, else sigmoid for one label, nothing
        for several, nor for tokens. apply_softmax: then over several labels.
        prompt, prompt_name: put before every text (of a pair before the first), as in `encode`; None: the folder's.
        max_length: tokens of a text or pair with the special ones; of a longer pair the longer text is truncated first.
        batch_size, max_tokens, show_progress_bar, convert_to_numpy, convert_to_tensor: as in `encode`.
        chat_template: in Jinja, for messages of the roles query and document, and system, the prompt; None: the
        folder's. For a language model that scores by what it would say next: the folder has sentence-transformers'
        LogitScore, or is a ...ForCausalLM without modules.json with such a template, its own or this one, whose score
        is "yes" against "no". Pairs go through the template, and where they are truncated its end stays; a score is the
        difference of two logits, then the sigmoid.

        TypeError for an item that is neither a str nor a pair; ValueError for an option's value, a lone surrogate, a
        model without such a head or a usable tokenizer.
        """
        if not is_single(texts):
            texts = listed(texts, pairs=True)
        work = scoring(
            self, activation_fn=activation_fn, apply_softmax=apply_softmax, prompt=prompt, prompt_name=prompt_name,
            max_length=max_length, max_tokens=max_tokens, batch_size=batch_size, pairs=has_pairs(texts),
            chat_template=chat_template,
        )  # fmt: skip
        found = predict(self, texts, work, show_progress_bar)
        return as_asked(found, self.device, convert_to_numpy, convert_to_tensor, single=is_single(texts))

    @keywords(INPUTS, ARGUMENTS)
    def token_classify(
        self,
        texts: str | Iterable[str],
        *,
        aggregation_strategy: str = "none",
        ignore_labels: Sequence[str] = IGNORED,
        max_length: int | None = None,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        show_progress_bar: bool | None = None,
    ) -> list[Any]:
        """What a token classification head finds in texts, as transformers' pipeline of that name: a list of dicts for
        each text, of a single str its own.

        aggregation_strategy: "none" gives a dict for each token: entity, score, index, word, start, end (in characters
        of the text). "simple" gives a dict for each run of neighbours with the same label: entity_group, score, word,
        start, end. "first", "average" and "max" first give all tokens of a word the same label.
        ignore_labels: labels that are left out.
        max_length, batch_size, max_tokens, show_progress_bar: as in `encode`. Texts that are too long are truncated.

        TypeError for an item that is not a str; ValueError for an option's value, a lone surrogate, a model without
        such a head, a tokenizer that gives no offsets.
        """
        given = texts if isinstance(texts, str) else listed(texts)
        found: list[Any] = token_classify(
            self, given, aggregation_strategy=aggregation_strategy, ignore_labels=ignore_labels, max_length=max_length,
            max_tokens=max_tokens, batch_size=batch_size, show_progress_bar=show_progress_bar,
        )  # fmt: skip
        return found

    @keywords({"text": "texts"}, ARGUMENTS)
    def predict_entities(
        self,
        texts: str | Iterable[str],
        labels: Sequence[str] | Sequence[Sequence[str]],
        *,
        threshold: float = 0.5,
        flat_ner: bool = True,
        multi_label: bool = False,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        show_progress_bar: bool | None = None,
    ) -> list[Any]:
        """What a GLiNER finds in texts: a list of dicts for each text, of a single str its own, as the package `gliner`
        gives them: start, end (in characters), text, label, score.

        labels: what to look for, in words; a list for all texts, or one for each. threshold: the least probability.
        flat_ner: entities do not overlap; False: one may lie within another. multi_label: the same words may have
        several labels. Words beyond the config's max_len are left out, with a warning.
        batch_size, max_tokens, show_progress_bar: as in `encode`; tokens of labels count.

        TypeError for an item that is not a str, or labels with descriptions; ValueError for an option's value, a model
        that is no GLiNER, a text that is too long with its labels.
        """
        given = [texts] if isinstance(texts, str) else listed(texts)
        found = predict_entities(
            self, given, labels, threshold=threshold, flat_ner=flat_ner, multi_label=multi_label,
            batch_size=batch_size, max_tokens=max_tokens, show_progress_bar=show_progress_bar,
        )  # fmt: skip
        return found[0] if isinstance(texts, str) else found

    @keywords({"documents": "texts", "activation_fct": "activation_fn"}, ARGUMENTS, passed_to=predict)
    def rerank(
        self,
        query: str,
        texts: Iterable[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """How well each text answers the query, best first: [{"corpus_id": place in `texts`, "score": float}, ...].

        As sentence-transformers' CrossEncoder.rank. top_k: so many only. return_documents: with "text". options: of
        `predict`; apply_softmax and convert_to_numpy change nothing. TypeError for convert_to_tensor, ValueError for a
        model whose head has not one label.

        Of a folder for one vector a token (ColBERT) scores are those of `similarity`: the query and the texts are
        computed apart, with their prompts and lengths, and no vector of a text leaves the device. options then:
        max_length (of a text), batch_size, max_tokens, show_progress_bar; TypeError for others.
        """
        if compares_tokens(self):
            return rerank_tokens(self, query, texts, top_k, return_documents, options)
        _, labels = task_of(self, options.get("chat_template"))
        if labels != 1:
            raise ValueError(f"rerank needs a head with one label, this one has {labels}; predict takes pairs as well")
        given = to_rank(query, texts, top_k)
        if options.pop("convert_to_tensor", False):
            raise TypeError("rerank gives scores as float; predict(pairs, convert_to_tensor=True) gives a tensor")
        for name in ("apply_softmax", "convert_to_numpy"):  # without effect on one label's scores as float
            options.pop(name, None)
        found = self.predict([(query, text) for text in given], **options)
        return rank(found, given, top_k, return_documents)

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """`rerank` by CrossEncoder's name."""
        return self.rerank(query, documents, top_k=top_k, return_documents=return_documents, **options)

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the labels that `predict` gives scores for. ValueError for a model without such a head."""
        return labels_of(self)

    @keywords(INPUTS, ARGUMENTS, passed_to=encode)
    def encode_query(self, texts: str | Iterable[str], **options: Any) -> Any:
        """`encode` with the prompt called "query" and the folder's query_length. Without such a prompt none is put
        before the texts, the default one neither."""
        return self.encode(texts, task="query", **options)

    @keywords(INPUTS, ARGUMENTS, passed_to=encode)
    def encode_document(self, texts: str | Iterable[str], **options: Any) -> Any:
        """`encode` with the prompt called "document" and the folder's document_length; see encode_query."""
        return self.encode(texts, task="document", **options)
