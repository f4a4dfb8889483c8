"""Model classes whose code is not transformers' own: those that ftbert reads, and what each changes.

config.json names a class in `auto_map` (its code lies beside the weights, or in another repository of the hub) or in
`architectures`. What the class computes stands in its code alone, so a class is read where somebody has read that code
and written a row here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Config = dict[str, Any]
PROJECTION = "projection"  # the task of the head that a checkpoint keeps a `Projection` as


@dataclass(frozen=True)
class Projection:
    """A linear layer without bias over each token's last state, which is the class's last hidden state. name: of the
    layer among the tensors; width: the config's key for its outputs. "": the folder's files say what becomes of states,
    and the layer may be one of theirs."""

    name: str
    width: str


@dataclass(frozen=True)
class OwnClass:
    """code: "module.Class" as auto_map says it, without the repository; "Class" alone: as architectures says it,
    without any code beside the weights. kinds: the model types that it is read of, "" for a config that says none.
    Both may have `*`. source: who publishes it. beside: by auto_map alone, since the name in architectures is of a
    class of transformers, too. says: entries of config.json, in transformers' words, that mean what the class computes.
    when: what config.json must say for that. note: for the table of docs/models.md."""

    code: str
    kinds: tuple[str, ...]
    source: str
    says: Mapping[str, Any] = field(default_factory=dict)
    projection: Projection | None = None
    note: str = ""
    beside: bool = False
    when: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, document: Config) -> bool:
        """Whether the row is for such a config, if that names the class."""
        kind = str(document.get("model_type") or "")
        said = all(key in document and document[key] == value for key, value in self.when.items())
        return said and any(fnmatchcase(kind, one) for one in self.kinds)

    def names(self, name: str) -> bool:
        """Whether a config that says this name means the class."""
        if "." in name:
            return fnmatchcase(name, self.code)
        return not self.beside and fnmatchcase(name, self.code.rpartition(".")[2])


_BOTH_WAYS = {"is_causal": False}
_MOSAIC = {"model_type": "alibi_bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
FLASH = "jinaai/xlm-roberta-flash-implementation"
_FLASH_KINDS = ("xlm-roberta", "")
_JINA = {"model_type": "jina_embeddings_v3"}
_FLASH_CODE = "modeling_xlm_roberta.XLMRoberta*"
_JINA_5 = "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"
_TASKS = "an adapter for each task, `encode(task=)`"
_VOYAGE_4 = "voyageai/voyage-4-nano"
_VOYAGE = Projection("linear", "num_labels")

OWN_CLASSES = (
    # What transformers computes for the type, too.
    OwnClass("modeling_hf_nomic_bert.NomicBert*", ("nomic_bert",), "nomic-ai/nomic-bert-2048"),
    OwnClass("modeling.New*", ("new",), "Alibaba-NLP/new-impl"),
    OwnClass("model.NeoBERT*", ("neobert",), "chandar-lab/NeoBERT"),
    OwnClass("modeling_eurobert.EuroBert*", ("eurobert",), "EuroBERT/EuroBERT-210m"),
    OwnClass("modeling_phi3.Phi3*", ("phi3",), "microsoft/Phi-3-mini-4k-instruct"),
    # One name for two: gte-Qwen2-7B's code attends in both directions; gte-Qwen2-1.5B's is causal, also where its
    # config says is_causal false (vLLM's page of supported models). is_causal counts, as in transformers' own class.
    OwnClass(
        "modeling_qwen.Qwen2*", ("qwen2",), "Alibaba-NLP/gte-Qwen2-7B-instruct, NovaSearch/stella_en_1.5B_v5",
        note="`is_causal` counts as in transformers; gte-Qwen2-1.5B-instruct's code is causal whatever it says",
    ),
    # transformers' encoder, with pooling or a layer behind it that AutoModel does not read.
    OwnClass(
        "HF_ColBERT", ("*",), "colbert-ir/colbertv2.0", projection=Projection("linear", ""),
        note="artifact.metadata says how texts are read",
    ),
    OwnClass("Contriever", ("bert",), "facebook/contriever"),
    OwnClass("BertForCL", ("bert",), "princeton-nlp/SimCSE"),
    OwnClass("RobertaForCL", ("roberta", "xlm-roberta"), "princeton-nlp/SimCSE"),
    OwnClass("LLaMAForCausalLM", ("llama",), "the first conversions of LLaMA"),
    # BERT with ALiBi and gated layers.
    OwnClass("modeling_bert.JinaBert*", ("bert",), "jinaai/jina-bert-implementation", {"model_type": "alibi_bert"}),
    OwnClass(
        "bert_layers.Bert*", ("bert",), "mosaicml/mosaic-bert-base, zhihan1996/DNABERT-2-117M", _MOSAIC, beside=True
    ),
    # XLM-RoBERTa by flash-attention's names, with rotary positions or a table of them.
    OwnClass(
        _FLASH_CODE, ("jina_embeddings_v3", *_FLASH_KINDS), FLASH, _JINA, Projection("linear", ""), beside=True,
        when={"architectures": ["HF_ColBERT"]}, note="of jina-colbert-v2; artifact.metadata says how texts are read",
    ),
    OwnClass(_FLASH_CODE, ("jina_embeddings_v3",), FLASH),
    OwnClass(_FLASH_CODE, _FLASH_KINDS, FLASH, _JINA, beside=True, when={"position_embedding_type": "rotary"}),
    OwnClass(
        _FLASH_CODE, _FLASH_KINDS, "jinaai/jina-reranker-v2-base-multilingual", {"model_type": "xlm-roberta"},
        beside=True, when={"position_embedding_type": "absolute"},
        note="a document too long is cut; its code's `rerank` scores windows of it",
    ),
    # An adapter for each task.
    OwnClass("modeling_lora.XLMRobertaLoRA", ("jina_embeddings_v3", "xlm-roberta"), FLASH, _JINA, note=_TASKS),
    OwnClass(
        _JINA_5, ("jina_embeddings_v5",), "jinaai/jina-embeddings-v5-text-nano", {"model_type": "eurobert"},
        note=_TASKS, when={"is_decoder": False},
    ),
    OwnClass(
        _JINA_5, ("jina_embeddings_v5",), "jinaai/jina-embeddings-v5-text-small", {"model_type": "qwen3"}, note=_TASKS
    ),
    # Attention in both directions.
    OwnClass("modeling_qwen3_bidirectional.Qwen3BidirectionalModel", ("qwen3",), _VOYAGE_4, _BOTH_WAYS, _VOYAGE),
    OwnClass("VoyageQwen3BidirectionalEmbedModel", ("qwen3",), f"vLLM, of {_VOYAGE_4}", _BOTH_WAYS, _VOYAGE),
    OwnClass(
        "llama_bidirectional_model.LlamaBidirectionalModel", ("llama_bidirec",),
        "nvidia/llama-nemotron-embed-1b-v2, llama-embed-nemotron-8b", {"model_type": "llama", **_BOTH_WAYS},
    ),
    OwnClass(
        "modeling.PPLXQwen3Model", ("bidirectional_pplx_qwen3",), "perplexity-ai/pplx-embed-v1-0.6b",
        {"model_type": "qwen3", **_BOTH_WAYS}, note="its module FlexibleQuantizer rounds 127 tanh(x)",
    ),
    OwnClass("modeling_llama_encoder.LlamaEncoderModel", ("llama",), "McGill-NLP/LLM2Vec", _BOTH_WAYS),
    OwnClass("modeling_mistral_encoder.MistralEncoderModel", ("mistral",), "McGill-NLP/LLM2Vec", _BOTH_WAYS),
)  # fmt: skip

# Model types of which transformers' own class does not read use_bidirectional_attention, while the code that writes it
# into their config does.
_READ_ELSEWHERE = ("llama", "mistral", "qwen2", "qwen3")


def named_classes(document: Config) -> list[str]:
    """Model classes as auto_map names them, "module.Class", and the first of architectures, "Class"."""
    listed: Any = document.get("auto_map")
    values = [listed[key] for key in listed if str(key).startswith("AutoModel")] if isinstance(listed, dict) else []
    found = [str(value).rpartition("--")[2] for value in values]
    architectures = document.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str) and architectures[0]:
        found.append(architectures[0])
    return list(dict.fromkeys(found))


def find_class(document: Config, name: str) -> OwnClass | None:
    """The row of a class that `named_classes` found; None where there is none for the config's model type."""
    return next((row for row in OWN_CLASSES if row.names(name) and row.fits(document)), None)


def own_class(document: Config) -> OwnClass | None:
    """The row of the class that a config names first, code beside the weights before architectures."""
    found = (find_class(document, name) for name in named_classes(document))
    return next((row for row in found if row is not None), None)


def in_transformers_words(document: Config) -> Config:
    """The same config with what its class computes said as transformers' own class of the type reads it."""
    row = own_class(document)
    said = dict(row.says) if row is not None else {}
    if document.get("use_bidirectional_attention") is True and document.get("model_type") in _READ_ELSEWHERE:
        said |= _BOTH_WAYS
    return document | said
