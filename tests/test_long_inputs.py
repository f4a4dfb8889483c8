"""The longest inputs of published models: rows near both ends and between, and memory that grows with the tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_no_worse, in_dtype
from conftest import Place, randomise
from reference_encoder import encode

import ftbert

# The published rotary bases, windows, epsilons and lengths of ModernBERT-base and Qwen3-Embedding, in small layers.
MODELS: dict[str, dict[str, Any]] = {
    "modernbert": {
        "num_hidden_layers": 4, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "local_attention": 128, "norm_eps": 1e-5, "max_position_embeddings": 8192, "num_attention_heads": 2,
        "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0,
    },
    "qwen3": {
        "num_hidden_layers": 1, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 48, "use_cache": False,
    },
}  # fmt: skip


def make(family: str, device: str) -> Any:
    """With heads as published on a GPU, where they choose the kernel; smaller ones on the CPU, for its time."""
    from transformers import AutoConfig, AutoModel

    wide = {"modernbert": {"hidden_size": 128}, "qwen3": {"head_dim": 128}}[family] if device == "cuda" else {}
    config = AutoConfig.for_model(family, vocab_size=500, intermediate_size=96, **MODELS[family] | wide)
    return randomise(AutoModel.from_config(config))


def test_more_tokens_than_offsets_count(place: Place) -> None:
    """Padding among them: offsets have 32 bits, and a GPU counts them before anybody asks."""
    model = ftbert.load(make("modernbert", place.device), device=place.device, dtype=place.dtype)
    ids = torch.full((1, 1), 7, device=place.device).expand(2**22, 512)
    for mask in (None, torch.ones(1, 1, dtype=torch.int64, device=place.device).expand(2**22, 512)):
        with pytest.raises(RuntimeError, match=r"at most 2\^31-1 tokens in one call, padding among them, got 2147483648"):
            model(ids, mask)


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_the_longest_text(place: Place, family: str) -> None:
    """Beside a short one. Float64 judges: angles in float32, as transformers has them, are 1e-3 off at position 32,767."""
    reference, longest = make(family, place.device), MODELS[family]["max_position_embeddings"]
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 500, (longest + 40,), generator=generator)
    cu = torch.tensor([0, longest, longest + 40], dtype=torch.int32)
    got = model.forward_packed(ids.to(place.device), cu.to(place.device), longest).cpu()
    weights = dict(model.checkpoint.items(torch.float64))
    between = torch.randint(40, longest - 40, (48,), generator=generator)
    rows = torch.cat([torch.arange(40), between, torch.arange(longest - 40, longest)])
    for first, length, some in ((0, longest, rows), (longest, 40, torch.arange(40))):
        text = ids[None, first : first + length]
        want = encode(model.config, weights, text, torch.ones_like(text), rows=some)[0]
        ours = got[first : first + length][some]
        if place.dtype == torch.float32:
            assert_close(ours, want, atol=3e-5 if place.device == "cpu" else 5e-5, what=f"text of {length} tokens")
            continue
        theirs = in_dtype(reference, place.dtype).to(place.device)(text.to(place.device)).last_hidden_state.cpu()
        assert_no_worse(ours, theirs[0, some], want)


# Prints the bytes that were taken above those before, at most, by the first and by a text of twice its length.
_PEAKS = """
import sys
import torch
import ftbert
folder, device, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(2)
def peak():
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
model = ftbert.load(folder, device=device)
found = []
with torch.inference_mode():
    for tokens in (512, length // 2, length):
        model.forward_packed(torch.full((tokens,), 7, device=device), torch.tensor([0, tokens], dtype=torch.int32, device=device), tokens)
        found.append(peak())
print(found[1] - found[0], found[2] - found[0])
"""


@pytest.mark.parametrize("family", MODELS)
def test_memory_grows_with_the_tokens(device: str, family: str, tmp_path: Path) -> None:
    make(family, device).save_pretrained(tmp_path)
    longest = MODELS[family]["max_position_embeddings"]
    call = [sys.executable, "-c", _PEAKS, str(tmp_path), device, str(longest)]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    half, whole = map(int, done.stdout.split())
    print(f"{family} on {device}: {half / 2**20:.1f} MiB for {longest // 2} tokens, {whole / 2**20:.1f} MiB for {longest}")
    assert half > 0 and whole <= 2.5 * half + 2**20  # of memory by the square of the length it is 4 times as much
    assert whole < longest * longest * 4 / 2  # half of the scores of one head
