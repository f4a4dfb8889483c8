"""Calls of whole models: inputs under every mask, packed ones, what they are compared with and what they run."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from compare import assert_close, assert_no_worse
from conftest import Place

import ftbert

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    "192": {"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 320},
    "64": {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64},
    "960": {"hidden_size": 960, "num_attention_heads": 15, "intermediate_size": 1920},
}


def inputs(batch: int, seq: int, vocab: int = 120, types: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """The same ids under every kind of mask."""
    generator = torch.Generator().manual_seed(batch * 10007 + seq)
    ids = torch.randint(0, vocab, (batch, seq), generator=generator)
    kinds = torch.randint(0, types, (batch, seq), generator=generator)
    lengths = torch.randint(1, seq + 1, (batch,), generator=generator)
    right = (torch.arange(seq)[None] < lengths[:, None]).long()
    holes = torch.randint(0, 2, (batch, seq), generator=generator)
    holes[:, 0] = 1
    all_masks = {"full": torch.ones_like(right), "right": right, "left": right.flip(1), "holes": holes}
    return {
        name: {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds} for name, mask in all_masks.items()
    }


def move(batch: dict[str, torch.Tensor], place: Place) -> dict[str, torch.Tensor]:
    return {key: value.to(place.device, copy=True) for key, value in batch.items()}


def check_against_transformers(reference: Any, model: ftbert.Model, batch: dict[str, torch.Tensor], place: Place) -> None:
    """The gates of the design: fp32 absolute; 16 bit no worse than 1.25x transformers in that dtype, and by cosine."""
    batch = move(batch, place)
    kept = batch["attention_mask"].bool()
    out = model(**batch)
    got = out.last_hidden_state
    assert got.dtype == place.dtype and not got[~kept].any(), "rows at padding must be exactly 0"
    with torch.no_grad():
        exact = reference.to(place.device, torch.float32)(**batch)
        expected = exact.last_hidden_state[kept]
        if place.dtype == torch.float32:
            limit = 2e-5 if place.device == "cpu" else 5e-5
            assert_close(got[kept], expected, atol=limit, what="last_hidden_state")
            if reference.pooler is not None and batch["attention_mask"][:, 0].all():
                assert_close(out.pooler_output, exact.pooler_output, atol=limit, what="pooler_output")
            return
        theirs = reference.to(place.dtype)(**batch).last_hidden_state[kept].float()
        reference.to(torch.float32)
    mine = got[kept].float()
    assert_close(mine, expected, atol=100 * place.eps, rtol=100 * place.eps, what="last_hidden_state, roughly")
    assert_no_worse(mine, theirs, expected)
    cosine = torch.cosine_similarity(mine.double(), expected.double(), dim=-1).min()
    assert cosine >= (0.9999 if place.dtype == torch.float16 else 0.999), f"cosine {cosine}"


def check_every_mask(
    reference: Any, model: ftbert.Model, batch: int, seq: int, place: Place, what: str = "", types: int = 2
) -> None:
    for name, one in inputs(batch, seq, types=types).items():
        try:
            check_against_transformers(reference, model, one, place)
        except AssertionError as error:
            raise AssertionError(f"{what} {batch}x{seq}, mask {name}: {error}") from error


def check_sizes(reference: Any, model: Callable[[int], ftbert.Model], dtype: torch.dtype, what: str) -> None:
    """Every mask, in batches of few tokens; model(i) runs the i-th of them."""
    sizes = [(1, seq) for seq in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128)] + [(8, 16), (3, 37), (128, 1), (6, 128)]
    for i, (batch, seq) in enumerate(sizes):
        if batch * seq * reference.config.hidden_size >= 512:  # else too few values for a mean error to be compared
            check_every_mask(reference, model(i), batch, seq, Place("cuda", dtype), f"{what}, model {i},")


def ragged(mask: str, place: Place, batch: int = 64, seq: int = 31) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [batch, seq]: several passes of the CPU, empty rows at either end and in between."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 96, (batch, seq), generator=generator)
    lengths = torch.randint(1, seq + 1, (batch, 1), generator=generator)
    if mask == "full":
        lengths[:] = seq
    kept = (torch.arange(seq) < lengths).long()
    if mask == "left":
        kept = kept.flip(1)
    elif mask == "holes":
        kept = torch.randint(0, 2, (batch, seq), generator=generator)
    elif mask == "mostly empty":
        kept[1:-1] = 0
        kept[[batch // 2]] = 1
    if mask != "full":
        kept[[0, 1, 30, -1]] = 0
    return ids.to(place.device), kept.to(place.device)


def first_kept(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, seq, hidden] -> [batch, hidden], zeros for an empty row."""
    rows = hidden[torch.arange(len(mask)), mask.argmax(1)]
    return torch.where(mask.any(1, keepdim=True), rows, torch.zeros_like(rows))


def packed(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 120, (sum(lengths),), generator=generator).cuda()
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    return ids, cu, max(lengths)


def check_on_threads(model: ftbert.Model, calls: list[tuple[torch.Tensor, torch.Tensor, int]], threads: int, rounds: int) -> None:
    """Packed calls in any order, from threads that each change between three streams: as one after another."""
    want = [model.forward_packed(*call).clone() for call in calls]
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
        for _ in range(rounds):
            i = draw.randrange(len(calls))
            with torch.cuda.stream(draw.choice(streams)):
                got = model.forward_packed(*calls[i])
                torch.cuda.current_stream().synchronize()
                assert_close(got, want[i], atol=64 * torch.finfo(torch.float16).eps, what=f"call {i} of thread {seed}")

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, seed) for seed in range(threads)]:
            done.result()


def profiled() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA])


def kernels(word: str, call: Callable[[], object]) -> int:
    """How many of that name a second call runs."""
    call()
    with profiled() as profile:
        call()
        torch.cuda.synchronize()
    return sum(word in event.name for event in profile.events())


def layernorms(call: Callable[[], object]) -> int:
    """How many do nothing else, but for the embeddings'."""
    return kernels("add_bias_input_layernorm", call)
