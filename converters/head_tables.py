"""The heads that transformers puts on the encoders: which tensors they have, and how to tell which one a file holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftbert.checkpoint import EncoderConfig, HeadConfig, Shape, activations, shown
from ftbert.converters.families import FAMILIES
from ftbert.converters.family import Config, Family, entry


@dataclass(frozen=True)
class HeadRow:
    """One way to build the head of a task; the fields are those of ftbert.checkpoint.HeadConfig.

    architecture: how the names of transformers' classes with it end. families: model types, () for all that no other
    row of the task names. dense, norm, out: their stems; out_bias: what else the bias of `out` is called. activation:
    "=" and a key: of the config. source: or the config's key for it and what that may say, the default first. biases:
    which there may not be, as (dense, norm or out, the config's key for it, its default); "": no key says it.
    """

    task: str
    architecture: str
    source: str | tuple[str, ...]
    out: str
    dense: str = ""
    activation: str = "none"
    norm: str = ""
    out_bias: str = ""
    families: tuple[str, ...] = ()
    biases: tuple[tuple[str, str, bool], ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """What a file must hold; a tied decoder has no weight of its own."""
        out = "out.weight" if any(stem == "out" for stem, _, _ in self.biases) else "out.bias"
        return (*(f"{stem}.weight" for stem in ("dense", "norm") if getattr(self, stem)), out)

    def reads(self, config: Config) -> str:
        """The source that the config asks for."""
        if isinstance(self.source, str):
            return self.source
        key, *known = self.source
        if (said := config.get(key, known[0])) not in known:
            raise ValueError(f"{key} {shown(said)} of the head for {self.task} is not one of {', '.join(known)}")
        return "first" if said in ("cls", "bos") else str(said)

    def biased(self, config: Config) -> dict[str, bool]:
        said = {stem: entry(config, key, "bool", default) if key else default for stem, key, default in self.biases}
        return {f"{stem}_bias": there for stem, there in said.items()}

    def names(self, kind: str) -> tuple[str, ...]:
        """What dense.weight, ..., out.bias may be called in their file, likeliest first."""
        stem, _, ending = kind.partition(".")
        names = [f"{getattr(self, stem)}.{ending}"] if getattr(self, stem) else []
        return (*names, self.out_bias) if kind == "out.bias" and self.out_bias else tuple(names)


_ROBERTAS = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl")
_SEQUENCE = ("sequence_classification", "ForSequenceClassification")
_TOKENS = ("token_classification", "ForTokenClassification")
_ANSWERS = ("question_answering", "ForQuestionAnswering")
_MASKED = ("masked_lm", "ForMaskedLM")
_CHOICE = ("multiple_choice", "ForMultipleChoice")
_NEXT = ("next_sentence", "ForNextSentencePrediction")
_CLS = "cls.predictions."
_ELECTRA = ("electra",)
# Of encoders. Without is_decoder, which is refused, their head is the masked language model's, tensor by tensor.
_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_MODERNBERT_HEAD: Any = {
    "dense": "head.dense", "activation": "=classifier_activation", "norm": "head.norm", "families": ("modernbert",),
}  # fmt: skip
_MODERNBERT_BIASES = (("dense", "classifier_bias", False), ("norm", "norm_bias", False))
_MODERNBERT_POOLING = ("classifier_pooling", "cls", "mean")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")

# Tasks of the ...ForPreTraining classes; a family has two of them, or replaced_token alone.
_PRETRAINING = ("masked_lm", "next_sentence", "sentence_order", "replaced_token")

ROWS = (
    HeadRow(*_SEQUENCE, "pooler", "classifier"),
    HeadRow(*_SEQUENCE, "first", "classifier.out_proj", "classifier.dense", "tanh",
            families=(*_ROBERTAS, "mpnet", "jina_embeddings_v3")),
    HeadRow(*_SEQUENCE, "first", "classifier.out_proj", "classifier.dense", "gelu", families=_ELECTRA),
    HeadRow(*_SEQUENCE, "first", "classifier", "pre_classifier", "relu", families=("distilbert",)),
    HeadRow(*_SEQUENCE, _MODERNBERT_POOLING, "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_SEQUENCE, ("classifier_pooling", "late", "bos", "mean"), "classifier", "dense", "gelu",
            families=("eurobert",)),
    HeadRow(*_SEQUENCE, "last", "score", families=_LLAMAS, biases=(("out", "", False),)),
    HeadRow(*_TOKENS, "tokens", "classifier"),
    HeadRow(*_TOKENS, "tokens", "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_TOKENS, "tokens", "score", families=_LLAMAS, biases=(("out", "token_classification_bias", True),)),
    HeadRow(*_ANSWERS, "tokens", "qa_outputs"),
    HeadRow(*_ANSWERS, "tokens", "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "transform.dense", "=hidden_act",
            _CLS + "transform.LayerNorm", _CLS + "bias"),
    HeadRow(*_MASKED, "tokens", "lm_head.decoder", "lm_head.dense", "gelu", "lm_head.layer_norm", "lm_head.bias",
            families=(*_ROBERTAS, "mpnet", "jina_embeddings_v3")),
    HeadRow(*_MASKED, "tokens", "vocab_projector", "vocab_transform", "=hidden_act", "vocab_layer_norm",
            families=("distilbert",)),
    HeadRow(*_MASKED, "tokens", "predictions.decoder", "predictions.dense", "=hidden_act", "predictions.LayerNorm",
            "predictions.bias", families=("albert",)),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "dense", "=hidden_act", _CLS + "LayerNorm",
            families=("rembert",)),
    HeadRow(*_MASKED, "tokens", "generator_lm_head", "generator_predictions.dense", "gelu",
            "generator_predictions.LayerNorm", families=_ELECTRA),
    HeadRow(*_MASKED, "tokens", _CLS + "decoder", _CLS + "transform.dense", "=hidden_act",
            _CLS + "transform.layer_norm", _CLS + "bias", families=("nomic_bert",)),
    HeadRow(*_MASKED, "tokens", "decoder", **_MODERNBERT_HEAD,
            biases=(*_MODERNBERT_BIASES, ("out", "decoder_bias", True))),
    HeadRow(*_MASKED, "tokens", "lm_head", families=("eurobert",), biases=(("out", "mlp_bias", False),)),
    HeadRow("replaced_token", "ForPreTraining", "tokens", "discriminator_predictions.dense_prediction",
            "discriminator_predictions.dense", "=hidden_act", families=_ELECTRA),
    HeadRow(*_CHOICE, "pooler", "classifier"),
    HeadRow(*_CHOICE, "first", "classifier", "pre_classifier", "relu", families=("distilbert",)),
    HeadRow(*_CHOICE, "first", "classifier", "sequence_summary.summary", "=summary_activation", families=_ELECTRA),
    HeadRow(*_CHOICE, _MODERNBERT_POOLING, "classifier", biases=_MODERNBERT_BIASES, **_MODERNBERT_HEAD),
    HeadRow(*_NEXT, "pooler", "cls.seq_relationship", families=("bert", "ernie", "megatron-bert")),
    HeadRow("sentence_order", "ForPreTraining", "pooler", "sop_classifier.classifier", families=("albert",)),
)  # fmt: skip

# Beginnings of tensors that belong to heads: left out where they are not wanted.
_STEMS = {stem for row in ROWS for stem in (row.out, row.dense, row.norm) if stem}
PREFIXES = ("dropout.", *sorted({stem.partition(".")[0] + "." for stem in _STEMS}))


def rows_of(family: str) -> list[HeadRow]:
    """One row for each task that the family has."""
    named = {row.task: row for row in ROWS if family in row.families}
    rows = {row.task: row for row in ROWS if not row.families} | named
    lacks = FAMILIES[family].lacks if family in FAMILIES else ()
    return [row for row in rows.values() if row.task not in lacks]


def find_rows(family: str, architecture: str, found: dict[str, Shape]) -> list[HeadRow]:
    """The heads of a file with the tensors `found`.

    architecture: transformers' class, "" where the config names none. A class whose head is not in the file gives none
    (sentence encoders often say ...ForMaskedLM). Without a class, tensors that could be several heads give none.
    """
    if architecture.endswith(_LANGUAGE_MODELS):
        architecture = "ForMaskedLM"
    if architecture.endswith("ForPreTraining"):
        tasks = [row for row in rows_of(family) if row.task in _PRETRAINING]
    else:
        tasks = [row for row in rows_of(family) if architecture.endswith(row.architecture) or not architecture]
    if architecture:
        return [row for row in tasks if any(_present(row, kind, found) for kind in row.parts)]
    whole = [row for row in tasks if all(_present(row, kind, found) for kind in row.parts)]
    return whole if len(whole) == 1 else []


def _present(row: HeadRow, kind: str, found: dict[str, Shape]) -> bool:
    return any(name in found for name in row.names(kind))


def head_config(
    row: HeadRow, family: Family, config: Config, encoder: EncoderConfig, found: dict[str, Shape], tied: bool
) -> HeadConfig:
    """The head that a file holds; its sizes come from the tensors."""
    activation = row.activation
    if activation == "=hidden_act":
        activation = family.value(config, "layer.ffn.activation")
    if activation == "=summary_activation":
        if config.get("summary_type", "first") != "first" or config.get("summary_use_proj", True) is not True:
            raise ValueError("the multiple choice head needs summary_type 'first' and summary_use_proj")
        activation = config.get("summary_activation", "gelu") or "none"
    if activation == "=classifier_activation":
        activation = config.get("classifier_activation", "gelu")
    if row.dense and (not isinstance(activation, str) or activation not in activations()):
        known = ", ".join(activations())
        raise ValueError(f"activation {shown(activation)} of the head for {row.task} is not one of {known}")

    def rows(stem: str, otherwise: int) -> int:
        kinds = (f"{stem}.weight", f"{stem}.bias")
        return next((found[name][0] for kind in kinds for name in row.names(kind) if found.get(name)), otherwise)

    return HeadConfig(
        task=row.task,
        source=row.reads(config),
        outputs=encoder.vocab if row.task == "masked_lm" else rows("out", 1),
        width=rows("dense", encoder.hidden) if row.dense else 0,
        activation=activation,
        norm_eps=family.value(config, "layer.ffn_norm.eps") if row.norm else 0.0,
        tied=tied,
        padding_id=_padding_id(config) if row.source == "last" else -1,
        **row.biased(config),
    )


def _padding_id(config: Config) -> int:
    """transformers' decoders read the last token that is no padding by its id."""
    said = entry(config, "pad_token_id", "int", -1)
    return int(said)
