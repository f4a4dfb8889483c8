"""The kernel that stores keys and values in the rows of a cache."""

from __future__ import annotations

import pytest
import torch
from conftest import Place, places_here
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert
HERE = places_here()


def check(place: Place, rows: list[int], heads: int, kv_heads: int, size: int, cache_rows: int) -> None:
    """Those of tokens become the columns of qkv, bit for bit; no other number of the cache changes."""
    generator, width = torch.Generator().manual_seed(0), kv_heads * size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(place.dtype).to(place.device)

    qkv, keys, values = random(len(rows), (heads + 2 * kv_heads) * size), random(cache_rows, width), random(cache_rows, width)
    _, k, v = qkv.split([heads * size, width, width], dim=1)
    inside = [(t, row) for t, row in enumerate(rows) if 0 <= row < cache_rows]
    wanted = [keys.clone(), values.clone()]
    for want, new in zip(wanted, (k, v), strict=True):
        for t, row in inside:
            want[row] = new[t]
    there = torch.tensor(rows, dtype=torch.int32, device=place.device)
    ops.store_keys_values(qkv, there, heads, kv_heads, keys, values)
    assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "cache_rows"),
    [(1, 9, 3, 64, 40), (7, 4, 4, 32, 7), (300, 8, 1, 128, 1000), (33, 2, 2, 256, 64), (0, 2, 1, 64, 8)],
)
def test_rows_of_the_cache(place: Place, tokens: int, heads: int, kv_heads: int, size: int, cache_rows: int) -> None:
    """Several tokens to a block's width and several turns of a block over one; the first and last rows among them."""
    order = torch.randperm(cache_rows, generator=torch.Generator().manual_seed(1)).tolist()
    rows = ([0, cache_rows - 1] + [row for row in order if 0 < row < cache_rows - 1])[:tokens]
    check(place, rows, heads, kv_heads, size, cache_rows)


@settings(max_examples=40, deadline=None)
@given(place=st.sampled_from(HERE), rows=st.lists(st.integers(-3, 14), unique=True, max_size=10), kv_heads=st.integers(1, 3), shared=st.integers(1, 3))
def test_tokens_without_a_row_are_left_out(place: Place, rows: list[int], kv_heads: int, shared: int) -> None:
    """Below 0, as past the last token, and past the last row."""
    check(place, rows, kv_heads * shared, kv_heads, 8, 11)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": torch.zeros(3, dtype=torch.int64)}, "rows: expected contiguous Int of at least 3"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows: expected contiguous Int of at least 3"),
        ({"kv_heads": 3}, "qkv: expected"),
        ({"keys": torch.zeros(5, 16)}, r"keys: expected contiguous Float \[5, 32\]"),
        ({"values": torch.zeros(4, 32)}, r"values: expected contiguous Float \[5, 32\]"),
        ({"values": torch.zeros(5, 32).double()}, r"values: expected contiguous Float \[5, 32\]"),
        ({"keys": torch.zeros(32, 5).T}, "keys: expected a contiguous tensor of rank 2"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, object], words: str) -> None:
    right = {"qkv": torch.zeros(3, 128), "rows": torch.zeros(3, dtype=torch.int32), "heads": 2, "kv_heads": 1}
    right |= {"keys": torch.zeros(5, 32), "values": torch.zeros(5, 32)}
    ops.store_keys_values(**right)
    with pytest.raises(RuntimeError, match=words):
        ops.store_keys_values(**right | change)
