"""The heads that transformers puts on the encoders: their tensors, and how to tell a file's head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ftbert.checkpoint import (
    CAUSAL_LM,
    POOLED,
    TEXT_EMBEDS,
    VOCABULARY,
    HeadConfig,
    ModelConfig,
    Shape,
    activations,
    shown,
)
from ftbert.converters.families import FAMILIES
from ftbert.converters.family import Config, Family, entry


@dataclass(frozen=True)
class HeadRow:
    """One way to build the head of a task; the fields are those of ftbert.checkpoint.HeadConfig.

    architecture: how the names of transformers' classes with it end. families: model types, () for all that no other
    row of the task names. dense, norm, out: their stems; out_bias: what else the bias of `out` is called. activation:
    or the config's key for it, its default and, where that is another, what null says. source: or the config's key for
    it and what that may say, the default first. other_form: a key of the config, true where it is
    absent, and the fields that differ where it is false. biases: which there may not be, as (dense, norm or out, the
    config's key for it, its default); "": no key says it. only: keys of the config that nothing here computes with,
    each with what it may say, the default first. tied: of a head over the vocabulary, the default of
    tie_word_embeddings. any_id: the source "last" is the last token whatever its id. around: what may stand before its
    stems, as it does before the encoder's names.
    """

    task: str
    architecture: str
    source: str | tuple[str, ...]
    out: str = ""
    dense: str = ""
    activation: str | tuple[str, ...] = "none"
    norm: str = ""
    out_bias: str = ""
    families: tuple[str, ...] = ()
    other_form: tuple[str, dict[str, str]] | None = None
    biases: tuple[tuple[str, str, bool], ...] = ()
    only: tuple[tuple[Any, ...], ...] = ()
    tied: bool = True
    any_id: bool = False
    around: str = ""

    def formed(self, config: Config) -> HeadRow:
        """The form that the config asks for."""
        if self.other_form is None or entry(config, self.other_form[0], "bool", True):
            return self
        return replace(self, other_form=None, **self.other_form[1])  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[str, ...]:
        """What a file must hold; a tied decoder has no weight of its own."""
        found = [f"{stem}.weight" for stem in ("dense", "norm") if getattr(self, stem)]
        out = "out.weight" if any(stem == "out" for stem, _, _ in self.biases) else "out.bias"
        return (*found, out) if self.out else tuple(found)

    def reads(self, config: Config) -> str:
        """The source that the config asks for."""
        if isinstance(self.source, str):
            return self.source
        key, *known = self.source
        if (said := config.get(key, known[0])) not in known:
            raise ValueError(f"{key} {shown(said)} of the head for {self.task} is not one of {', '.join(known)}")
        return "first" if said in ("cls", "bos") else str(said)

    def activated(self, config: Config) -> str:
        """The activation that the config asks for."""
        said: Any = self.activation
        if isinstance(self.activation, tuple):
            key, default, *null = self.activation
            said = config.get(key, default) or (null or [default])[0]
        if self.dense and (not isinstance(said, str) or said not in activations()):
            known = ", ".join(activations())
            raise ValueError(f"activation {shown(said)} of the head for {self.task} is not one of {known}")
        return str(said)

    def check(self, config: Config) -> None:
        """ValueError for an entry of the config that makes another head of it."""
        for key, *known in self.only:
            if (said := config.get(key, known[0])) not in known:
                raise ValueError(
                    f"{key} {shown(said)} is not supported: the head for {self.task} needs {key} {shown(known[0])}"
                )

    def ties(self, config: Config) -> bool:
        """Whether the config says that its matrix is the embeddings'."""
        return self.task in VOCABULARY and bool(entry(config, "tie_word_embeddings", "bool", self.tied))

    def biased(self, config: Config) -> dict[str, bool]:
        said = {stem: entry(config, key, "bool", default) if key else default for stem, key, default in self.biases}
        return {f"{stem}_bias": there for stem, there in said.items()}

    def names(self, kind: str) -> tuple[str, ...]:
        """What dense.weight, ..., out.bias may be called in their file, likeliest first."""
        stem, _, ending = kind.partition(".")
        names = [f"{getattr(self, stem)}.{ending}"] if getattr(self, stem) else []
        names += [self.around + name for name in names if self.around]
        return (*names, self.out_bias) if kind == "out.bias" and self.out_bias else tuple(names)


_ROBERTAS = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl")
_SEQUENCE = ("sequence_classification", "ForSequenceClassification")
_TOKENS = ("token_classification", "ForTokenClassification")
_ANSWERS = ("question_answering", "ForQuestionAnswering")
_MASKED = ("masked_lm", "ForMaskedLM")
_CAUSAL = (CAUSAL_LM, "ForCausalLM")
_CHOICE = ("multiple_choice", "ForMultipleChoice")
_TOWERS = ("clip_text_model",)
_COLUMNS = ("siglip_text_model", "siglip2_text_model")
_NEXT = ("next_sentence", "ForNextSentencePrediction")
_CLS = "cls.predictions."
_ELECTRA = ("electra",)
_HIDDEN_ACT = ("hidden_act", "gelu")
_DEBERTA: Any = {"families": ("deberta", "deberta-v2")}
_CONTEXT: Any = {"dense": "pooler.dense", "activation": ("pooler_hidden_act", "gelu"), **_DEBERTA}
_LM = "lm_predictions.lm_head"
_UNTIED = ("llama", "mistral", "ministral", "phi3", "qwen2", "qwen3")
_TIED = ("smollm3", "gemma", "gemma2", "gemma3_text")
_LLAMAS = (*_UNTIED, *_TIED)
_MODERNBERT_HEAD: Any = {
    "dense": "head.dense", "activation": ("classifier_activation", "gelu"), "norm": "head.norm",
    "families": ("modernbert",),
}  # fmt: skip
_MODERNBERT_DECODER: Any = {"families": ("modernbert-decoder",)}
_MODERNBERT_BIASES = (("dense", "classifier_bias", False), ("norm", "norm_bias", False))
_MODERNBERT_POOLING = ("classifier_pooling", "cls", "mean")
# transformers' classes of decoders. Of an encoder, which has no is_decoder, the head is its masked language model's.
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_LM_HEAD: Any = {
    "biases": (("out", "", False),),
    "only": (("final_logit_softcapping", None), ("logit_scale", None, 1), ("logits_scaling", None, 1)),
}

# Tasks of the ...ForPreTraining classes; a family has two of them, or replaced_token alone.
_PRETRAINING = ("masked_lm", "next_sentence", "sentence_order", "replaced_token")

ROWS = (
    HeadRow(*_SEQUENCE, "pooler", "classifier"),
    HeadRow(*_SEQUENCE, "first", "classifier.out_proj", "classifier.dense", "tanh",
            families=(*_ROBERTAS, "mpnet", "jina_embeddings_v3", "esm")),
    HeadRow(*_SEQUENCE, "first", "classifier.out_proj", "classifier.dense", "gelu", families=_ELECTRA),
    HeadRow(*_SEQUENCE, "first", "classifier.out_proj", "classifier.dense", _HIDDEN_ACT, families=("roformer",)),
    HeadRow(*_SEQUENCE, "first", "classifier", "pre_classifier", "relu", families=("distilbert",)),
    HeadRow(*_SEQUENCE, "first", "classifier", **_CONTEXT),
    HeadRow(*_SEQUENCE, _MODERNBERT_POOLING, "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_SEQUENCE, ("classifier_pooling", "late", "bos", "mean"), "classifier", "dense", "gelu",
            families=("eurobert",)),
    HeadRow(*_SEQUENCE, "last", "score", families=_LLAMAS, biases=(("out", "", False),)),
    HeadRow(*_SEQUENCE, "last", "classifier", biases=(*_MODERNBERT_BIASES, ("out", "classifier_bias", False)),
            **_MODERNBERT_HEAD | _MODERNBERT_DECODER),
    HeadRow(*_SEQUENCE, "first", "classifier", "dense", "tanh", families=("neobert",)),
    HeadRow(*_TOKENS, "tokens", "classifier"),
    HeadRow(*_TOKENS, "tokens", "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_TOKENS, "tokens", "score", families=_LLAMAS, biases=(("out", "token_classification_bias", True),)),
    HeadRow(*_ANSWERS, "tokens", "qa_outputs"),
    HeadRow(*_ANSWERS, "tokens", "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "transform.dense", _HIDDEN_ACT,
            _CLS + "transform.LayerNorm", _CLS + "bias"),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "transform.dense", _HIDDEN_ACT,
            _CLS + "transform.LayerNorm", _CLS + "bias", **_DEBERTA,
            other_form=("legacy", {"out": _LM, "out_bias": "", "dense": _LM + ".dense", "norm": _LM + ".LayerNorm"})),
    HeadRow(*_MASKED, "tokens", "lm_head.decoder", "lm_head.dense", "gelu", "lm_head.layer_norm", "lm_head.bias",
            families=(*_ROBERTAS, "mpnet", "jina_embeddings_v3", "esm")),
    HeadRow(*_MASKED, "tokens", "vocab_projector", "vocab_transform", ("activation", "gelu"), "vocab_layer_norm",
            families=("distilbert",)),
    HeadRow(*_MASKED, "tokens", "predictions.decoder", "predictions.dense", ("hidden_act", "gelu_new"),
            "predictions.LayerNorm", "predictions.bias", families=("albert",)),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "dense", _HIDDEN_ACT, _CLS + "LayerNorm",
            families=("rembert",)),
    HeadRow(*_MASKED, "tokens", "generator_lm_head", "generator_predictions.dense", "gelu",
            "generator_predictions.LayerNorm", families=_ELECTRA),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "transform.dense", ("hidden_act", "silu"),
            _CLS + "transform.layer_norm", _CLS + "bias", families=("nomic_bert",)),
    HeadRow(*_MASKED, "tokens", "decoder", **_MODERNBERT_HEAD,
            biases=(*_MODERNBERT_BIASES, ("out", "decoder_bias", True))),
    HeadRow("masked_lm", "LMHead", "tokens", "decoder", families=("neobert",), tied=False),
    HeadRow(*_MASKED, "tokens", "lm_head", families=("eurobert",), biases=(("out", "mlp_bias", False),)),
    HeadRow(*_CAUSAL, "tokens", "lm_head", families=_UNTIED, tied=False, **_LM_HEAD),
    HeadRow(*_CAUSAL, "tokens", "lm_head", families=_TIED, **_LM_HEAD),
    HeadRow(*_CAUSAL, "tokens", "decoder", "lm_head.dense", ("classifier_activation", "gelu"), "lm_head.norm",
            biases=(*_MODERNBERT_BIASES, ("out", "decoder_bias", True)), **_MODERNBERT_DECODER),
    HeadRow("replaced_token", "ForPreTraining", "tokens", "discriminator_predictions.dense_prediction",
            "discriminator_predictions.dense", _HIDDEN_ACT, families=_ELECTRA),
    HeadRow(*_CHOICE, "pooler", "classifier"),
    HeadRow(*_CHOICE, "first", "classifier", "pre_classifier", "relu", families=("distilbert",)),
    HeadRow(*_CHOICE, "first", "classifier", "sequence_summary.summary", ("summary_activation", "gelu", "none"),
            families=_ELECTRA, only=(("summary_type", "first"), ("summary_use_proj", True))),
    HeadRow(*_CHOICE, "first", "classifier", **_CONTEXT),
    HeadRow(*_CHOICE, _MODERNBERT_POOLING, "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_NEXT, "pooler", "cls.seq_relationship", families=("bert", "ernie", "megatron-bert")),
    HeadRow(POOLED, "", "end", families=_TOWERS),
    HeadRow(TEXT_EMBEDS, "ModelWithProjection", "end", "text_projection", families=_TOWERS,
            biases=(("out", "", False),)),
    HeadRow(POOLED, "", "last", "head", families=_COLUMNS, any_id=True, around="text_model."),
    HeadRow("sentence_order", "ForPreTraining", "pooler", "sop_classifier.classifier", families=("albert",)),
)  # fmt: skip

# Beginnings of tensors that belong to heads: left out where they are not wanted.
# A pooler is the encoder's, of most families.
_STEMS = {stem for row in ROWS for stem in (row.out, row.dense, row.norm) if stem} - {_CONTEXT["dense"]} | {_LM}
_DOTTED = {stem.partition(".")[0] + "." for stem in _STEMS if "." in stem}
# A stem without a dot is one linear layer: what else begins so, such as a decoder's blocks, is no head.
_ALONE = {stem for stem in _STEMS if "." not in stem and f"{stem}." not in _DOTTED}
PREFIXES = ("dropout.", *sorted(_DOTTED), *(f"{stem}.{kind}" for stem in sorted(_ALONE) for kind in ("weight", "bias")))


def rows_of(family: str) -> list[HeadRow]:
    """One row for each task that the family has."""
    named = {row.task: row for row in ROWS if family in row.families}
    rows = {row.task: row for row in ROWS if not row.families} | named
    lacks = FAMILIES[family].lacks if family in FAMILIES else ()
    return [row for row in rows.values() if row.task not in lacks]


def find_rows(family: str, architecture: str, config: Config, found: dict[str, Shape]) -> list[HeadRow]:
    """The heads of a file with the tensors `found`.

    architecture: transformers' class, "" where the config names none. A class whose head is not in the file gives none
    (sentence encoders often say ...ForMaskedLM), but a decoder's that is tied has no tensor of its own. Without a
    class, tensors that could be several heads give none.
    """
    rows = [row.formed(config) for row in rows_of(family)]
    if architecture.endswith(_LANGUAGE_MODELS) and not any(row.task == CAUSAL_LM for row in rows):
        architecture = "ForMaskedLM"
    if architecture.endswith("ForPreTraining"):
        tasks = [row for row in rows if row.task in _PRETRAINING]
    else:
        tasks = [row for row in rows if architecture.endswith(row.architecture) or not architecture]
    bare = [row for row in tasks if not row.parts]
    tasks = [row for row in tasks if row.parts]
    if architecture:
        tied = [row for row in tasks if row.task == CAUSAL_LM and row.ties(config)]
        return tied or bare + [row for row in tasks if any(_present(row, kind, found) for kind in row.parts)]
    whole = [row for row in tasks if all(_present(row, kind, found) for kind in row.parts)]
    return bare + (whole if len(whole) == 1 else [])


def _present(row: HeadRow, kind: str, found: dict[str, Shape]) -> bool:
    return any(name in found for name in row.names(kind))


def head_config(
    row: HeadRow, family: Family, config: Config, encoder: ModelConfig, found: dict[str, Shape], tied: bool
) -> HeadConfig:
    """The head that a file holds; its sizes come from the tensors."""
    row.check(config)

    def rows(stem: str, otherwise: int) -> int:
        kinds = (f"{stem}.weight", f"{stem}.bias")
        return next((found[name][0] for kind in kinds for name in row.names(kind) if found.get(name)), otherwise)

    return HeadConfig(
        task=row.task,
        source=row.reads(config),
        outputs=encoder.vocab if row.task in VOCABULARY else rows("out", 1) if row.out else 0,
        width=rows("dense", encoder.hidden) if row.dense else 0,
        activation=row.activated(config),
        norm_eps=family.value(config, "layer.ffn_norm.eps") if row.norm else 0.0,
        tied=tied,
        padding_id=_padding_id(config) if row.source == "last" and not row.any_id else -1,
        end_id=_end_id(config) if row.source == "end" else -1,
        **row.biased(config),
    )


def _end_id(config: Config) -> int:
    """transformers' CLIP takes 2 for a config that was written wrong, and then the largest id."""
    said = entry(config, "eos_token_id", "int", 49407)
    return -1 if said == 2 else int(said)


def _padding_id(config: Config) -> int:
    """transformers' decoders read the last token that is no padding by its id."""
    said = entry(config, "pad_token_id", "int", -1)
    return int(said)
