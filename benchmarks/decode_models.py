"""Models of bench_decode.py, all of them GGUF files in Q8_0: Llama's layers with random weights, or a real file's.

    python benchmarks/decode_models.py SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct.Q8_0.gguf
    python benchmarks/decode_models.py llama-2-7b llama-2-7b.gguf       random weights, and words for servers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gguf_writer import F32, Q8_0, Entry, floats, pack_q8_0, write_gguf  # noqa: E402

from ftbert.converters.gguf_file import read_gguf  # noqa: E402
from ftbert.converters.gguf_source import open_gguf  # noqa: E402

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inter: int
    vocab: int
    context: int = 4096
    theta: float = 1e4
    tied: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """[n, k] of the products that a token needs once a layer. Products with the same input are one."""
        return [
            (self.hidden + 2 * self.kv_width, self.hidden), (self.hidden, self.hidden), (2 * self.inter, self.hidden),
            (self.hidden, self.inter),
        ]  # fmt: skip

    @property
    def weights(self) -> int:
        """That a token's products read: of the word table one row, unless the head is tied to it."""
        return self.layers * sum(n * k for n, k in self.matrices) + self.vocab * self.hidden

    def step_bytes(self, context: float, texts: int, weight: float, cached: float) -> float:
        """That one token of each text has to read: weights once, of each text the keys and values. weight, cached:
        bytes of a number."""
        return self.weights * weight + 2 * self.layers * self.kv_width * context * texts * cached


SHAPES = {
    "llama-2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49152, 8192, 1e5, tied=True),
    "tiny": Shape(2, 64, 4, 2, 96, 160, 256),
}


def made_up_words(count: int) -> dict[str, Any]:
    """A vocabulary of Llama-2's kind as a file's metadata: three controls, the bytes, then words."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_]
    pieces += [f"\u2581w{i}" for i in range(len(pieces), count)]
    kinds = np.array([2, 3, 3, *[6] * len(bytes_), *[1] * (count - 259)], np.int32)  # unknown, control, byte, normal
    said: dict[str, Any] = {"model": "llama", "tokens": pieces, "token_type": kinds}
    said |= {"scores": -np.arange(count, dtype=np.float32), "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def write_random(path: Path, shape: Shape, seed: int = 0, words: bool = False) -> Path:
    """Every matrix of a size is the same one: 7 GB take seconds, and no cache holds them. Without words a model of
    token ids, whose texts have no end; with them (at least 259) one that servers take."""
    random, made = np.random.default_rng(seed), dict[tuple[int, int], NDArray[np.uint8]]()

    def blocks(n: int, k: int) -> NDArray[np.uint8]:
        if (n, k) not in made:
            values = random.integers(-127, 128, (n, k), dtype=np.int8)  # times the scales: about 0.02
            values[:, ::32] = 127  # as each block of llama.cpp's has a number of that size
            scales = random.uniform(1.4e-4, 4.1e-4, (n, k // 32)).astype(np.float16)
            made[n, k] = pack_q8_0(values, scales)
        return made[n, k]

    def matrix(name: str, n: int, k: int) -> Entry:
        return Entry(f"{name}.weight", (n, k), Q8_0, partial(blocks, n, k))

    def tensors() -> Iterator[Entry]:
        h, kv, inter = shape.hidden, shape.kv_width, shape.inter
        norm = partial(Entry, shape=(h,), type=F32, data=lambda: np.ones(h, np.float32))
        yield matrix("token_embd", shape.vocab, h)
        for i in range(shape.layers):
            yield norm(f"blk.{i}.attn_norm.weight")
            yield norm(f"blk.{i}.ffn_norm.weight")
            sizes = {"attn_q": (h, h), "attn_k": (kv, h), "attn_v": (kv, h), "attn_output": (h, h)}
            sizes |= {"ffn_gate": (inter, h), "ffn_up": (inter, h), "ffn_down": (h, inter)}
            for name, (n, k) in sizes.items():
                yield matrix(f"blk.{i}.{name}", n, k)
        yield norm("output_norm.weight")
        if not shape.tied:
            yield matrix("output", shape.vocab, h)

    said = {
        "block_count": shape.layers, "context_length": shape.context, "embedding_length": shape.hidden,
        "feed_forward_length": shape.inter, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head_size, "rope.freq_base": shape.theta, "vocab_size": shape.vocab,
    }  # fmt: skip
    begin = {"general.architecture": "llama", "general.file_type": 7}
    begin |= made_up_words(shape.vocab) if words else {"tokenizer.ggml.model": "no_vocab"}
    return write_gguf(path, begin | {f"llama.{key}": value for key, value in said.items()}, tensors())


def requantise(source: Path, target: Path) -> Path:
    """The same model with all matrices in Q8_0, from any type (the package gguf reads most)."""
    file = read_gguf(source)
    said = file.metadata | {"general.file_type": 7, "general.quantization_version": 2}
    return write_gguf(target, said, (floats(name, file.read(name).float().numpy()) for name in file.tensors))


def shape_of(path: Path) -> Shape:
    """Of a file of the architecture llama."""
    config, _ = open_gguf(path)
    return Shape(
        config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"],
        config["num_key_value_heads"], config["intermediate_size"], config["vocab_size"],
        config["max_position_embeddings"], config["rope_parameters"]["rope_theta"], config["tie_word_embeddings"],
    )  # fmt: skip


def transformers_model(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """LlamaForCausalLM with a file's weights, dequantised."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config, source = open_gguf(path)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**config)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    state = model.state_dict()
    for name in source.shapes():
        state[name].copy_(source.read(name))
    return model


if __name__ == "__main__":
    if sys.argv[1] in SHAPES:
        write_random(Path(sys.argv[2]), SHAPES[sys.argv[1]], words=True)
    else:
        requantise(Path(sys.argv[1]), Path(sys.argv[2]))
