"""Writes models.md from the tables in converters/ and what pytest collects: python docs/make_models.py"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "models.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

_TASKS = {
    "encoder": "encoder",
    "sequence_classification": "sequence class.",
    "token_classification": "token class.",
    "question_answering": "question answering",
    "masked_lm": "masked LM",
    "causal_lm": "causal LM",
    "multiple_choice": "multiple choice",
    "next_sentence": "next sentence",
    "sentence_order": "sentence order",
    "replaced_token": "replaced token",
    "pooled": "pooled output",
    "text_embeds": "text embeds",
}

_READ = (
    "HuggingFace's files are read as they are (safetensors, `.bin`, sharded, `model.fp16.safetensors`). The",
    "tokenizer is AutoTokenizer's, or with a warning tokenizer.json itself where that gives other ids",
    "(RoFormer's cuts words with the package `rjieba`, which no file holds: there the class counts). A",
    "sentence-transformers folder's prompts, poolings, Dense modules and `truncate_dim` count as there, and",
    "so do a CrossEncoder's settings, SpladePooling, MultiVectorMask and LogitScore; of a CLIPModel module",
    "texts run. A StaticEmbedding or a model2vec folder (embeddings with `mapping` and `weights`, int8 too)",
    "is a model without layers, `static_embedding`; where config.json says model2vec, texts are read as",
    "model2vec does: unknown tokens count for nothing, and sentence-transformers counts them. A Router with a",
    "SparseStaticEmbedding (opensearch's doc models) gives queries their sparse vectors by the table. Other",
    "modules are refused by name. A ColBERT's queries are made longer as PyLate does, also by tokens which no",
    "other token attends to. A live model is compared with ftbert over a few tokens when it is loaded, an `.onnx`",
    "file (extra `onnx`) over several masks, which takes 3 s for BERT base: a difference is refused. `.gguf`",
    "files of llama.cpp are read with their tokenizer, quantized ones dequantised ([gguf.md](gguf.md)). Files",
    "that `onnxruntime.quantization.quantize_dynamic` has written, as vector databases ship them, are read",
    'too: their integers times their scales are the weights, and `dtype="int8"` multiplies by the integers.',
    "What onnxruntime's optimisers have fused (Attention, SkipLayerNormalization, EmbedLayerNormalization,",
    "BiasGelu, FastGelu, MultiHeadAttention, FusedMatMul, FusedGemm; in 8 bits QAttention and",
    "QEmbedLayerNormalization) is taken apart. A graph that counts each row's tokens instead of reading the mask",
    "is right for padding on the right alone; ftbert is right under any mask. A graph's scores of texts or",
    "tokens (BERT's, RoBERTa's, ELECTRA's, DistilBERT's, MPNet's and ALBERT's heads) are read and compared too:",
    "`predict` and `rerank` take such a file. Vectors that a graph has pooled are recognised, and a warning says",
    "so where `encode` would pool in another way.",
    "PEFT folders (`adapter_config.json` beside the weights, or with the base that it names) are LoRA alone,",
    "with DoRA, `use_rslora`, patterns of ranks and alphas, biases and `modules_to_save`, merged in float32",
    "as the weights are read; other types are refused by name. Adapters for tasks, in folders beside the",
    "weights (`adapters/NAME` or `NAME`) or in the weights themselves (jina-embeddings-v3), are merged when",
    "`task=` names them ([embed.md](embed.md)). The tensors of an adapter are looked up by the names in the base's",
    "file: adapters of jina-embeddings-v3-hf may have others, and are then refused. `ftbert convert` makes a",
    "folder of a model that loads in 0.1 s, for ftbert alone ([install.md](install.md)). `revision=` and",
    "`token=` are those of the hub. A GLiNER's folder is one encoder of these families under gliner_config.json, for",
    "`predict_entities` ([rerank.md](rerank.md)); its tokenizer and the encoder's config are those of",
    "`model_name` where the folder lacks them.",
)

# Written by hand, from what the tests print.
_REAL = (
    "- all-MiniLM-L6-v2 (bert): within 2e-5 of transformers, every mask; Spearman 0.8203 on the test set",
    "- SmolLM2-135M-Instruct (llama), dequantised from Q4_1: entries up to 43, at most 1.0e-4 from transformers, the",
    "  same next token for 812 of 812. From float64 3.1e-6 rms, transformers 2.4e-6; in bf16 0.021, transformers 0.041",
    "- Gemma 3 270M (gemma3_text, causal), dequantised from Q4_K_M: entries up to 71, at most 3.0e-4 from",
    "  transformers, the same next token for 824 of 824. From float64 7.1e-6 rms, transformers 2.7e-6; in bf16 0.035,",
    "  transformers 0.056. Its residual stream reaches 104,000, which fp16 does not hold: `load` warns",
)


# Prints the family and the task of each case of the test that is not skipped, as JSON in the last line.
_COLLECT = """
import json, sys
import pytest

class Cases:
    found = set()

    def pytest_collection_finish(self, session):
        for item in session.items:
            if item.get_closest_marker("skip") is None and item.get_closest_marker("xfail") is None:
                self.found.add((item.callspec.params["family"], item.callspec.params["task"]))

cases = Cases()
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", sys.argv[1]], plugins=[cases])
print("\\n" + json.dumps([int(code), sorted(cases.found)]))
"""
_TEST = "tests/test_families.py::test_equals_transformers"


def tested() -> set[tuple[str, str]]:
    """(family, task) of every case that pytest runs against transformers."""
    done = subprocess.run([sys.executable, "-c", _COLLECT, _TEST], cwd=ROOT, capture_output=True, text=True, check=True)
    code, cases = json.loads(done.stdout.strip().splitlines()[-1])
    if code or not cases:
        raise RuntimeError(f"pytest collects nothing of {_TEST}:\n{done.stdout[-2000:]}")
    return {(family, task) for family, task in cases}


def render() -> str:
    from families import SIZES, make_config

    from ftbert.checkpoint import OWN_CLASSES
    from ftbert.converters.families import find_family
    from ftbert.converters.family import Derived
    from ftbert.converters.refused import REFUSED

    cases = tested()
    lines = [
        "# Models",
        "",
        "Written by `docs/make_models.py` from the tables in `converters/` and what pytest collects of",
        f"`{_TEST}`; do not edit. Every \u2713 is a test: random weights,",
        f"{len(SIZES)} sizes (in one no dimension is a multiple of 4), right- and left-padded masks and masks with",
        "holes, against transformers in float32.",
        "",
        "| model type | " + " | ".join(_TASKS.values()) + " |",
        "|---|" + ":-:|" * len(_TASKS),
    ]
    families = sorted({family for family, _ in cases})
    for family in families:
        marks = ["\u2713" if (family, task) in cases else "" for task in _TASKS]
        lines.append(f"| {family} | " + " | ".join(marks) + " |")
    head = "| model type | norms | positions | token types | pooler | besides |"
    lines += ["", head, "|---" * 6 + "|"]
    for family in families:
        table = find_family(make_config(family, 0).to_dict())
        config = table.config(make_config(family, 0).to_dict())
        layers, bias = config.layers, config.relative_bias
        besides = [
            ("embedding projection", "embeddings.projection" in table.names),
            ("layers share weights", len({layer.weights_of for layer in layers}) < config.depth),
            ("relative position bias", bias is not None),
            ("a table of biases for each layer", bias is not None and bias.of == "layers"),
            ("a convolution beside the first layer", config.convolution is not None),
            ("products with positions", config.position_table is not None),
            ("word rows by the share of masked tokens", config.token_dropout is not None),
            ("scores without a scale", any(layer.attention.scale == 1 for layer in layers)),
            ("each token sees those before it", any(layer.attention.causal for layer in layers)),
            ("windows", any(layer.attention.window for layer in layers)),
            ("norms of queries and keys", any(layer.attention.qk_norm for layer in layers)),
            ("gated", any(layer.ffn.gated for layer in layers)),
            ("no norm over the embeddings", config.embedding_norm is None and config.projection_norm is None),
            ("no layers: a table of token vectors", not layers),
            ("task types, always 0", isinstance(table.names.get("embeddings.token_type"), Derived)),
        ]
        kinds = {norm.kind for layer in layers if (norm := layer.ffn_norm)}
        between = {"/sandwich" for layer in layers if layer.ffn_result_norm}
        places = "/".join(sorted({layer.norm_place for layer in layers})) + "".join(between)
        places += ", RMS" if kinds == {"rms"} else ""
        positions = {"absolute": "column", "from_padding": "counted from the padding id"}
        rotary = any(layer.attention.rotary for layer in layers)
        positions["none"] = "rotary" if rotary else "by distance" if layers else "none"
        cells = [
            family, places, positions[config.positions.kind], "yes" if config.token_types else "no",
            "yes" if "pooler" in table.names else "no", "; ".join(text for text, there in besides if there),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Any sizes; hidden must be a multiple of heads where the config has no `head_dim`. Decoders (llama, mistral,",
        "ministral, phi3, smollm3, qwen2, qwen3, gemma, gemma2, gemma3_text, modernbert-decoder) run as encoders,",
        "causal or, with `is_causal` false, in both directions; so they do with `use_bidirectional_attention`, which",
        "llama, mistral, qwen2, qwen3 and gemma3_text read. Some of SmolLM3's layers have no rotary positions. Gemma's",
        "`hidden_act` counts as in transformers, where `gelu` is erf's. Their head",
        "over the vocabulary, tied or not, is read when a score asks for it (`predict`, `rerank`, `Model.head`): no",
        "call of the model computes it. `new` is the type of the published GTE models (gte-en-v1.5,",
        "gte-multilingual); `alibi_bert` is ftbert's own word for BERT with ALiBi (jina-embeddings-v2, MosaicBERT,",
        "DNABERT-2), whose config says `bert` and names a class below. transformers has none of these two and of",
        "`neobert`: they are compared with PyTorch models after the published code (`ftbert/own_models`), no",
        "published weights among them. T5's encoders are read of checkpoints with a decoder too, and `optimize`",
        "computes the encoder of a model that generates. ESM's contacts, which read attention's weights, run the",
        "original under `optimize`; its `token_dropout` counts masked tokens that are kept, where transformers",
        "counts those at padding too. The text half of a CLIP or SigLIP checkpoint, or of a live model under",
        "`optimize`, runs alone; `encode` gives what its `get_text_features` gives, of SigLIP with texts padded to",
        "the model's length. Where the pooled output is of padding, `optimize` runs the original. Soft caps of",
        "attention scores (gemma2) run on the general path; of transformers' attentions `eager` alone has them.",
        "Activations: gelu (erf), gelu_new and its other spellings (tanh), quick_gelu, relu, silu, tanh. Rotary",
        "frequencies that change past the trained length (`rope_type` dynamic, nomic's `rotary_scaling_factor`) are",
        "those of each text's own tokens, as transformers and nomic's code have them for a text alone: there the",
        "longest of a batch decides for all, here a text does not depend on its neighbours. Of decoders that see",
        "earlier tokens alone longer texts are cut, since keys in a cache are turned already; `load` warns.",
        "",
        "With real weights, on sentences of STS-B, in float32 on the CPU (`tests/test_real_decoders.py`):",
        "",
        *_REAL,
        "",
        "## By name",
        "",
        "How folders of the hub run (`docs/hub_folders.tsv`), with a test of what sets each apart, on small random",
        "models; of all-MiniLM-L6-v2 with its own weights:",
        "",
        "| folder | runs as | test |",
        "|---|---|---|",
        *(f"| {names} | {how} | {_test(test)} |" for names, how, test in _folders()),
        "",
        "## How a model is read",
        "",
        *_READ,
        "",
        "Classes with code of their own under a known type (`auto_map`, or an `architectures` that transformers does",
        "not have) are read where `ftbert/own_classes.py` says what their code changes:",
        "",
        "| class | model types | published by | what it changes |",
        "|---|---|---|---|",
        *(f"| `{one.code}` | {_kinds(one)} | {one.source} | {_changes(one)} |" for one in OWN_CLASSES),
        "",
        "Every other one is refused by its name: what it computes is in its code alone. A live model of such a class",
        "is compared with ftbert's result on a few tokens, by `load` and `optimize`.",
        "",
        "## Refused",
        "",
        "With the reason in the error, a model of the hub before its weights are fetched:",
        "",
        *(f"- {', '.join(kinds)}: {reason}" for reason, kinds in _by_reason(REFUSED)),
        "- encoders with `is_decoder` or `is_causal`, all with `add_cross_attention`, `position_embedding_type` other",
        "  than the family's own, ALBERT with `inner_group_num` over 1, ELECTRA multiple choice with a `summary_type`",
        "  other than first, RoFormer's, which reads the last column, and its `rotary_value`",
        "- experts (nomic-embed-text-v2-moe: 2 of 8 in each second layer): a layer's product has one matrix for all",
        "  rows, and a GPU would tell the host in each such layer how many rows an expert gets",
        "- rotary positions scaled by another rule than linear, dynamic, llama3 and yarn (`new`: ntk), or of a part of",
        "  each head; `layer_types` other than full_attention and sliding_attention",
        "- soft caps and scales of a decoder's logits, where it has its head",
        "- ONNX graphs of ESM, T5, DeBERTa, BERT with ALiBi and the families with rotary positions; graphs of CLIP's",
        "  text model without its config.json, where the causal mask is said",
        "- ONNX graphs quantised by another way than onnxruntime's dynamic quantisation (MatMulInteger, int8 or",
        "  uint8), or with operators that neither ONNX nor onnxruntime's optimisers for BERT have; each by its name",
        "- every other model type: no table says which of its tensors is which",
        "",
        "Tensors outside the encoder and its head (`fit_denses`, a projection, a CRF) are left out with a warning;",
        "inside the encoder what is missing, misshapen or left over is an error.",
    ]
    return "\n".join(lines) + "\n"


def _folders() -> list[list[str]]:
    rows = (ROOT / "docs" / "hub_folders.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [row.replace("*", r"\*").split("\t") for row in rows]


def _test(named: str) -> str:
    """ValueError for a test that is not there."""
    file, _, function = named.partition("::")
    if f"def {function}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8"):
        raise ValueError(f"docs/hub_folders.py names {named}, which tests/ has not")
    return f"[{function}](../tests/{file})"


def _kinds(one: Any) -> str:
    return ", ".join(kind or "none" for kind in one.kinds).replace("*", "any")


def _changes(one: Any) -> str:
    said = [f"`{key}` {str(value).lower()}" for key, value in one.says.items()]
    layer = one.projection
    said = [f"with {_when(one)}: " + ", ".join(said)] if one.when else said
    width = [f"`{layer.width}` entries"] if layer and layer.width else []
    said += [f"`{layer.name}.weight` over each token's state", *width] if layer else []
    return ", ".join([*said, *([one.note] if one.note else [])]) or "nothing"


def _when(one: Any) -> str:
    return " and ".join(f"`{key}` {_words(value)}" for key, value in one.when.items())


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value).lower()


def _by_reason(refused: dict[str, str]) -> list[tuple[str, list[str]]]:
    kinds: dict[str, list[str]] = {}
    for kind, reason in sorted(refused.items()):
        kinds.setdefault(reason, []).append(kind)
    return sorted(kinds.items(), key=lambda one: one[1])


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
