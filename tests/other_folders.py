"""Folders of models that give sparse vectors, one for each token, or scores by what they would say next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from families import make_model
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers_offline import folder_of, sentence_folder, write
from transformers import RobertaConfig, RobertaForCausalLM

QUERY = "query: "
# A chat template for pairs. It ends in words of its own, which truncation must not lose.
_SYSTEM = "{% for m in messages if m.role == 'system' %}<Instruct>: {{ m.content }}\n{% endfor %}"
PAIR_TEMPLATE = _SYSTEM + "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n" + (
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}\n</s>end it"
)


def splade_folder(folder: Path, family: str = "bert", **pooling: Any) -> Path:
    source = folder_of(folder / "masked", family, "masked_lm")
    transformer = Transformer(str(source), transformer_task="fill-mask")
    made = SparseEncoder(modules=[transformer, SpladePooling(**pooling)], device="cpu", prompts={"query": QUERY})
    made.save_pretrained(str(folder / "splade"))
    return folder / "splade"


def routed_splade(folder: Path, default: str | None = "document") -> Path:
    """As opensearch's doc models: documents by the network, queries by a table of weights."""
    source = folder_of(folder / "masked", "bert", "masked_lm")
    transformer = Transformer(str(source), transformer_task="fill-mask")
    weights = torch.rand(len(transformer.tokenizer.get_vocab()), generator=torch.Generator().manual_seed(0))
    weights[::5] = 0
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(transformer.tokenizer, weight=weights)],
        document_modules=[transformer, SpladePooling(activation_function="log1p_relu")], default_route=default,
    )  # fmt: skip
    made = SparseEncoder(modules=[router], device="cpu", prompts={"query": QUERY})
    made.save_pretrained(str(folder / "routed"))
    return folder / "routed"


def bge_m3(folder: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A folder as BGE-M3 is published: XLM-RoBERTa, CLS pooling, and two linear layers beside its weights."""
    made = sentence_folder(folder, pooling="cls", normalize=True, include_prompt=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (made / name).unlink()
    write(made, "xlm-roberta", model_max_length=64)
    make_model("xlm-roberta", "encoder", 2, vocab_size=400, max_position_embeddings=68, pad_token_id=1).save_pretrained(made)
    generator = torch.Generator().manual_seed(3)
    layers = {
        name: {"weight": torch.randn(rows, 64, generator=generator) / 8, "bias": 1 + torch.rand(rows, generator=generator)}
        for name, rows in (("sparse_linear.pt", 1), ("colbert_linear.pt", 64))
    }
    for name, state in layers.items():
        torch.save(state, made / name)
    return made, layers


def colbert_folder(folder: Path, expansion: dict[str, Any] | None = None, **mask: Any) -> Path:
    source = sentence_folder(folder / "source")
    transformer = Transformer(str(source), query_expansion=expansion, document_length=12)
    torch.manual_seed(1)
    modules = [
        transformer, Dense(64, 24, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"),
        MultiVectorMask(**mask), Normalize("token_embeddings"),
    ]  # fmt: skip
    made = MultiVectorEncoder(modules=modules, device="cpu", prompts={"query": QUERY, "document": "the "})
    made.save_pretrained(str(folder / "colbert"))
    return folder / "colbert"


def stanford_folder(folder: Path, width: int = 24, **metadata: Any) -> Path:
    """A random BERT as colbert-ir publishes one: `linear` among its weights, artifact.metadata, no modules.json."""
    write(folder, "bert", model_max_length=64)
    made = make_model("bert", "encoder", 2, vocab_size=400, max_position_embeddings=68, pad_token_id=1)
    weights = {f"bert.{name}": tensor.clone() for name, tensor in made.state_dict().items()}
    weights["linear.weight"] = torch.randn(width, made.config.hidden_size, generator=torch.Generator().manual_seed(4)) / 8
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made.config.to_dict() | {"architectures": ["HF_ColBERT"]}))
    (folder / "artifact.metadata").write_text(json.dumps({"dim": width, "query_maxlen": 9, "doc_maxlen": 12, **metadata}))
    return folder


def scored(folder: Path, template: str | None = PAIR_TEMPLATE, false: int | None = 9, **settings: Any) -> Path:
    """A random RoBERTa that reads in both directions, with its language model's head."""
    source = write(folder / "source", "roberta", model_max_length=64)
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    RobertaForCausalLM(RobertaConfig(**sizes, max_position_embeddings=68, pad_token_id=1)).save_pretrained(source)
    given = {"processor_kwargs": {"chat_template": template}} if template else {}
    transformer = Transformer(str(source), transformer_task="text-generation", **given)
    CrossEncoder(modules=[transformer, LogitScore(7, false)], device="cpu", **settings).save_pretrained(str(folder / "scored"))
    return folder / "scored"
