"""What the benchmark of whole models runs: models of random weights, batches, and the points that have both."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from peers import Batch

from ftbert.evaluation import ragged_lengths, random_sequences
from ftbert.padded_batches import padded

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
# Published configurations: ModernBERT-base, Qwen3-Embedding-0.6B, DeBERTa-v3-base, T5-v1.1-XXL's encoder, ESM-2 650M.
MODERN: dict[str, dict[str, Any]] = {
    "modernbert": {
        "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 22,
        "num_attention_heads": 12, "intermediate_size": 1152, "max_position_embeddings": 8192, "local_attention": 128,
        "global_attn_every_n_layers": 3, "pad_token_id": 50283,
    },
    "qwen3": {
        "model_type": "qwen3", "vocab_size": 151669, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "pad_token_id": 151643,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "deberta": {
        "model_type": "deberta-v2", "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 0,
        "relative_attention": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "position_buckets": 256,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "pad_token_id": 0,
    },
    "t5": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 4096, "num_layers": 24, "num_heads": 64, "d_kv": 64,
        "d_ff": 10240, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "tie_word_embeddings": False,
    },
    "esm": {
        "model_type": "esm", "vocab_size": 33, "hidden_size": 1280, "num_hidden_layers": 33, "num_attention_heads": 20,
        "intermediate_size": 5120, "max_position_embeddings": 1026, "position_embedding_type": "rotary",
        "token_dropout": True, "emb_layer_norm_before": False, "pad_token_id": 1, "mask_token_id": 32,
        "layer_norm_eps": 1e-5,
    },
}  # fmt: skip
MODERN_POINTS = {
    "modernbert": ("1x128:full", "32x128:half", "32x512:full", "8x2048:half", "2x8192:full"),
    "qwen3": ("1x128:full", "32x128:half", "32x512:full", "8x2048:half"),
    "deberta": ("1x128:full", "8x128:half", "32x128:half", "32x512:full", "32x512:half"),
    "t5": ("1x77:full", "1x256:full", "1x512:full"),  # prompts of image models
    "esm": ("1x256:full", "8x512:half", "16x1000:half"),
}
CPU_POINTS = ("base:16x128:ragged", "base:16x128:full", "minilm:32x128:ragged", "minilm:32x128:full")
# Of a GPU: every model x batch x length x fill.
GRID = tuple(
    f"{model}:{batch}x{longest}:{fill}"
    for model in SHAPES
    for batch in (1, 8, 32, 64, 128)
    for longest in (32, 128, 384, 512)
    for fill in (("full",) if batch == 1 else ("full", "half"))
)
FP8_POINTS = (
    "minilm:1x128:full", "minilm:32x128:half", "minilm:32x512:full",
    "base:1x128:full", "base:8x128:half", "base:32x128:full", "base:32x128:half", "base:32x512:full",
    "base:32x512:half",
    "large:1x128:full", "large:32x128:half", "large:32x384:full", "large:32x384:half", "large:64x384:mlperf",
)  # fmt: skip
FILLS = ("ragged", "half", "full", "mlperf")
MLPERF_MEAN, MLPERF_LONGEST = 177, 384  # tokens of MLPerf's questions with their paragraphs


def usual_points(device: torch.device, dtype: str) -> list[tuple[str, int, int, str]]:
    """Those of a run that names none, and of models that are in it on request."""
    grid = FP8_POINTS if dtype in ("fp8", "int8") else GRID
    usual = [parse_point(point) for point in (grid if device.type == "cuda" else CPU_POINTS)]
    return usual + [parse_point(f"{name}:{point}") for name, points in MODERN_POINTS.items() for point in points]


def parse_point(text: str) -> tuple[str, int, int, str]:
    try:
        model, shape, fill = text.split(":")
        batch, longest = map(int, shape.split("x"))
    except ValueError:
        model = fill = ""
        batch = longest = 0
    if model not in {*SHAPES, *MODERN} or fill not in FILLS or min(batch, longest) < 1:
        raise argparse.ArgumentTypeError(f"expected e.g. base:16x128:ragged, got {text!r}")
    if fill == "mlperf" and (batch < 8 or longest != MLPERF_LONGEST):
        raise argparse.ArgumentTypeError(f"mlperf: expected at least 8 texts of {MLPERF_LONGEST} at most, got {text!r}")
    return model, batch, longest, fill


def reference_model(name: str, minilm: Path | None, device: torch.device) -> Any:
    """transformers, float32, on the device. Random weights of that shape, made there, since a CPU takes minutes for
    T5-XXL's; except the real MiniLM where it is given."""
    from transformers import AutoConfig, AutoModel, BertConfig, BertModel, T5EncoderModel

    if name == "minilm" and minilm:
        return AutoModel.from_pretrained(minilm).to(device).float().eval()
    torch.manual_seed(0)
    with device:
        if name in MODERN:
            config = dict(MODERN[name])
            made: Any = AutoConfig.for_model(config.pop("model_type"), **config)
            model = T5EncoderModel(made) if name == "t5" else AutoModel.from_config(made, dtype=torch.float32)
        else:
            model = BertModel(BertConfig(**SHAPES[name]), add_pooling_layer=False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Away from 0 and 1, so that a forgotten bias would show.
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in parameter_name.lower() and "weight" in parameter_name), 0.1)
    return model.eval()


def make_batch(vocab: int, batch: int, longest: int, fill: str, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    if fill == "full":
        lengths = [longest] * batch
    elif fill == "half":
        lengths = torch.randint(1, longest, (batch,), generator=generator).tolist()
        lengths[0] = longest
    elif fill == "mlperf":
        lengths = mlperf_lengths(batch)
    else:
        lengths = ragged_lengths(batch, longest)
    ids, mask = padded(random_sequences(vocab, lengths), "right", 0, device)
    return Batch(ids, mask, lengths)


def mlperf_lengths(batch: int) -> list[int]:
    """Lengths as of MLPerf's BERT: their mean is 177 to the nearest whole number of tokens, the longest has 384. In
    between they are spread as the logarithm of a normal variable, in an order drawn once."""
    normal = NormalDist()
    spread = [normal.inv_cdf((i + 0.5) / batch) for i in range(batch - 1)]

    def of(middle: float) -> list[int]:
        return [min(MLPERF_LONGEST, max(16, round(middle * 2 ** (0.6 * z)))) for z in spread] + [MLPERF_LONGEST]

    lengths = min((of(middle) for middle in range(60, 250)), key=lambda found: abs(sum(found) - MLPERF_MEAN * batch))
    random.Random(0).shuffle(lengths)
    return lengths
