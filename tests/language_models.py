"""Random language models of every family that generates, texts for them, and what a decoder makes of those."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from conftest import Place
from families import make_model
from small_tokenizers import tokenizer
from torch import Tensor

import ftbert

# Grouped heads in all; windows shorter than the texts in Mistral, Ministral, Phi-3, Qwen2 and Gemma 3. Heads of a size
# that GPUs fuse.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "ministral": {"sliding_window": 6},
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {"use_bidirectional_attention": False, "sliding_window": 7},
}
FAMILIES = list(SETTINGS)
LENGTHS = (40, 17, 3)
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"


@functools.cache
def made(family: str) -> Any:
    heads = {"max_position_embeddings": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    return make_model(family, "causal_lm", 0, **{"use_cache": True, **heads, **SETTINGS[family]}).eval()


@functools.cache
def texts(family: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, made(family).config.vocab_size, (n,), generator=generator) for n in LENGTHS]


@functools.cache
def loaded(family: str, place: Place) -> ftbert.Model:
    return ftbert.load(made(family), device=place.device, dtype=place.dtype)


def run(of: Any, place: Place, slots: list[int], ids: list[Tensor], all_rows: bool = True) -> list[Tensor]:
    """Of each sequence [tokens, vocab] on the CPU in float32."""
    cu = torch.tensor([0, *(len(one) for one in ids)]).cumsum(0).int()
    logits = of.forward(torch.cat(ids).to(place.device), cu, torch.tensor(slots, dtype=torch.int32), all_rows)
    return list(logits.float().cpu().split([len(one) if all_rows else 1 for one in ids]))


def error(got: Tensor, want: Tensor) -> float:
    """Of the worst position, the mean square over that of what is expected."""
    return float(((got - want).square().mean(-1) / want.square().mean(-1)).max())


def assert_same_decoders(ours: Any, of: Any, family: str, place: Place) -> None:
    """Of three slots: prompts and steps, several texts at a time, a copied prefix and a forgotten end."""
    ids = texts(family)
    bound = 1e-9 if place.dtype == torch.float32 else 256 * place.eps**2

    def same(slots: list[int], parts: list[Tensor]) -> None:
        got, want = run(ours, place, slots, parts), run(of, place, slots, parts)
        for mine, other in zip(got, want, strict=True):
            assert ((mine - other).square().mean() / other.square().mean()) <= bound
        assert ours.lengths() == of.lengths()

    same([0, 2], [ids[0][:16], ids[1][:9]])
    for at in range(16, 22):
        same([0, 2], [ids[0][at : at + 1], ids[1][at - 7 : at - 6]])
    for one in (of, ours):
        one.copy_prefix(0, [1], 10)
        one.truncate(0, 12)
    same([1, 0], [ids[2], ids[0][12:20]])


def random_llama(where: Path, kind: str = "bytes", **config: Any) -> Path:
    """A random Llama that ends texts by a token of generation_config.json, which its config does not name."""
    words = tokenizer(kind)
    reference = make_model("llama", "causal_lm", 0, vocab_size=len(words), eos_token_id=None, use_cache=True, **config)
    reference.generation_config.eos_token_id = [2, 7]
    reference.save_pretrained(where)
    words.chat_template = TEMPLATE
    words.save_pretrained(where)
    return where
