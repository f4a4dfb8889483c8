"""The last layer for the rows alone that are read, first, last or any: it gives what the whole last layer gives there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import first_kept, ragged
from compare import assert_close
from conftest import Place, first_of
from families import CASES, make_batch, make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BertModel, BertTokenizerFast

import ftbert

# LayerNorm after and before, a relative bias, projected embeddings, shared layers, positions counted from padding,
# windows, gates, rotary positions, sandwich norms, causal layers.
FAMILIES = ["bert", "megatron-bert", "xlm-roberta-xl", "mpnet", "deberta", "deberta-v2", "electra", "albert", "roberta", "modernbert", "nomic_bert"]
FAMILIES += ["gemma3_text", "mistral", "qwen3"]
MASKS = ["full", "right", "left", "holes", "mostly empty"]


def tolerance(place: Place) -> dict[str, float]:
    """Another number of rows may be summed in another order."""
    if place.dtype == torch.float32:
        return {"atol": 2e-6 if place.device == "cpu" else 4e-6, "rtol": 1e-6}
    return {"atol": 16 * place.eps, "rtol": 16 * place.eps}


def last_kept(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return first_kept(hidden.flip(1), mask.flip(1))


def some_rows(tokens: int, device: str, seed: int = 0) -> torch.Tensor:
    """Packed tokens in any order, some of them twice, some left out; none where there are no tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(tokens, 1), (tokens * 2 // 3,), generator=generator).to(device)


@pytest.mark.parametrize("attention", ["auto", "general"])
@pytest.mark.parametrize(
    ("family", "layers"), [*((family, 2) for family in FAMILIES), *((f, n) for f in FAMILIES[:2] for n in (0, 1))]
)
def test_equals_the_whole_forward(place: Place, family: str, layers: int, attention: str) -> None:
    reference = make_model(family, "encoder", 0, num_hidden_layers=layers)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype, attention=attention)
    for name in MASKS:
        # More sequences than tokens: buffers have rows for the sequences too.
        ids, mask = ragged(name, place, *((3000, 3) if name == "mostly empty" else ()))
        hidden, want_pooled = model.module(ids, mask)
        first, pooled = first_of(model.module, ids, mask)
        assert first.shape == (len(ids), 48) and first.dtype == place.dtype
        assert hidden.abs().max() > 0.1 and not first[~mask.bool().any(1)].any()
        assert_close(first, first_kept(hidden, mask), **tolerance(place), what=name)
        assert_close(pooled, want_pooled, **tolerance(place), what=f"{name}, pooled")
        last = model.module.forward_batch(ids, mask, None, None, 0, ["last"])[0]
        assert_close(last, last_kept(hidden, mask), **tolerance(place), what=f"{name}, last")
        rows = some_rows(int(mask.sum()), place.device)
        for index in (rows, rows.sort().values.int(), rows[:0]):
            got = model.module.forward_batch(ids, mask, None, None, 0, ["rows"], index)[0]
            assert_close(got, hidden[mask.bool()][index.long()], **tolerance(place), what=f"{name}, {len(index)} rows")
    for result in (*first_of(model.module, ids, mask * 0), *model.module.forward_batch(ids, mask * 0, None, None, 0, ["last"])):
        assert not result.any()
    assert first_of(model.module, ids[:0])[0].shape == (0, 48)
    none = torch.zeros(0, dtype=torch.long, device=place.device)
    assert model.module.forward_batch(ids[:0], None, None, None, 0, ["rows"], none)[0].shape == (0, 48)


@cache
def cached_model(family: str, place: Place, attention: str) -> ftbert.Model:
    return ftbert.load(make_model(family, "encoder", 0), device=place.device, dtype=place.dtype, attention=attention)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 7, 16, 31]), min_size=1, max_size=40).filter(any),
    family=st.sampled_from(FAMILIES), attention=st.sampled_from(["auto", "general"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_of_packed_ids(place: Place, lengths: list[int], family: str, attention: str, seed: int) -> None:
    """Of every kind they are those of all tokens, and those of the sequences in another order are permuted."""
    model, tokens = cached_model(family, place, attention), sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 96, (tokens,), generator=generator)
    parts = ids.split(lengths)
    order = torch.randperm(len(lengths), generator=generator)

    def run(parts: list[torch.Tensor], want: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        cu = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int().to(place.device)
        return model.forward_packed(torch.cat(parts).to(place.device), cu, max(lengths), want=want, rows=rows)

    whole, index = run(list(parts), "tokens"), some_rows(tokens, place.device, seed)
    for want in ("first", "last"):
        got, zero = run(list(parts), want), whole.new_zeros(whole.shape[1])
        expected = [part[0 if want == "first" else -1] if len(part) else zero for part in whole.split(lengths)]
        assert_close(got, torch.stack(expected), **tolerance(place), what=want)
        permuted = run([parts[i] for i in order], want)
        assert_close(permuted, got[order.to(place.device)], **tolerance(place), what=f"{want}, permuted")
    assert_close(run(list(parts), "rows", index), whole[index], **tolerance(place), what="rows")
    permuted = run([parts[i] for i in order], "tokens")
    expected_rows = torch.cat([whole.split(lengths)[i] for i in order])
    assert_close(permuted, expected_rows, **tolerance(place), what="tokens, permuted")


def test_several_wants_of_different_rows(place: Place) -> None:
    model = ftbert.load(make_model("bert", "encoder", 0), device=place.device, dtype=place.dtype)
    ids, mask = ragged("holes", place)
    rows, wants = some_rows(int(mask.sum()), place.device), ["last", "rows", "first", "tokens", "cu_seqlens"]
    for some in (wants, ["last", "rows"], ["rows", "first"], ["last", "cu_seqlens"], ["rows", "packed_index"]):
        index = rows if "rows" in some else None
        made = dict(zip(some, model.module.forward_batch(ids, mask, None, None, 0, some, index), strict=True))
        for name in set(some) & {"last", "rows", "first"}:
            alone = model.module.forward_batch(ids, mask, None, None, 0, [name], rows if name == "rows" else None)[0]
            assert_close(made[name], alone, **tolerance(place), what=f"{name} of {some}")


def test_rows_that_are_none(place: Place) -> None:
    """An error on the CPU; NaN on a GPU, whose memory the host does not read."""
    model = ftbert.load(make_model("bert", "encoder", 0), device=place.device, dtype=place.dtype)
    ids = torch.randint(5, 96, (12,), device=place.device)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=place.device)
    whole = model.forward_packed(ids, cu, 7)
    for bad in (-1, 12, 2**31, -(2**62)):
        rows = torch.tensor([3, bad, 11], device=place.device)
        if place.device == "cpu":
            with pytest.raises(RuntimeError, match=rf"rows: expected indices of packed tokens in \[0, 12\), got {bad} at \[1\]"):
                model.forward_packed(ids, cu, 7, want="rows", rows=rows)
            continue
        for wants in (["rows"], ["rows", "tokens"]):
            for _ in range(3):
                got = model.module.forward_batch(ids, None, None, cu, 7, wants, rows)[0]
                assert got[1].isnan().all(), wants
                assert_close(got[[0, 2]], whole[[3, 11]], **tolerance(place))
    for want, given_rows, words in (
        ("rows", None, "want: rows needs the argument rows"), ("first", ids[:2] % 5, "rows: nothing of `want` reads them"),
        ("rows", ids.float(), r"rows: expected int64 or int32 \[n\]"), ("rows", ids[None], r"rows: expected int64 or int32 \[n\]"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            model.forward_packed(ids, cu, 7, want=want, rows=given_rows)
    with pytest.raises(RuntimeError, match=r"rows: (there are no tokens|expected indices of packed tokens in \[0, 0\))"):
        model.forward_packed(ids[:0], cu * 0, 7, want="rows", rows=ids[:1])


@pytest.mark.parametrize("family", ["bert", "megatron-bert", "mpnet", "deberta-v2"])
def test_batch_equals_single_packed_and_again(place: Place, family: str) -> None:
    model = ftbert.load(make_model(family, "encoder", 0), device=place.device, dtype=place.dtype)
    model.use_cuda_graphs(False)  # a recording may run another kernel, chosen for its longest length
    ids, mask = ragged("right", place, batch=40)
    together = first_of(model.module, ids, mask)[0]
    for _ in range(5):
        assert torch.equal(together, first_of(model.module, ids, mask)[0])
    for i in range(0, 40, 3):
        alone = first_of(model.module, ids[i : i + 1], mask[i : i + 1])[0]
        assert_close(together[i : i + 1], alone, **tolerance(place), what=f"row {i}")
    kept, cu = mask.bool(), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    longest = int(mask.sum(1).max())
    packed = model.forward_packed(ids[kept], cu, longest, want="first")
    assert_close(packed, together, **tolerance(place))
    want = torch.ops.ftbert.gather_rows(model.forward_packed(ids[kept], cu, longest), cu, "first")
    assert_close(packed, want, **tolerance(place))


@pytest.mark.parametrize("attention", ["auto", "general"])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_a_text_has_the_same_bits_in_every_batch_on_the_cpu(family: str, attention: str) -> None:
    """Fused and general path, soft caps and additive biases; one thread, and two with sequences of their own."""
    model = ftbert.load(make_model(family, "encoder", 1), device="cpu", attention=attention)
    lengths = [3, 40, 17, 0, 1, 33, 40, 39, 25, 30, 38, 40]
    ids = [torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    threads = torch.get_num_threads()
    try:
        for torch_threads in (1, 2):
            torch.set_num_threads(torch_threads)
            together = model.forward_packed(torch.cat(ids), cu, max(lengths))
            for one, n, begin in zip(ids, lengths, cu.tolist(), strict=False):
                if n:
                    alone = model.forward_packed(one, torch.tensor([0, n], dtype=torch.int32), n)
                    assert torch.equal(together[begin : begin + n], alone), (n, torch_threads)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_outputs_without_the_last_hidden_state(place: Place, family: str, task: str) -> None:
    reference = make_model(family, task, 1)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    for mask in ("right", "left", "holes"):
        batch = {key: value.to(place.device) for key, value in make_batch(reference, task, mask).items()}
        want = model(**batch)
        got = model(**batch, output_last_hidden_state=False)
        assert got.last_hidden_state is None and set(got) == set(want) - {"last_hidden_state"}
        for name, value in got.items():
            assert_close(value, want[name], **tolerance(place), what=f"{name}, {mask}")


def test_run_first_is_not_for_heads_of_every_token() -> None:
    reference = make_model("bert", "token_classification", 0)
    with pytest.raises(ValueError, match="a head of this model reads every token; call run"):
        ftbert.load(reference).module.run_first(**make_batch(reference, "token_classification", "right"))


def test_a_head_of_the_first_token_runs_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = make_model("bert", "sequence_classification", 0)
    model, batch = ftbert.load(reference), make_batch(reference, "sequence_classification", "right")
    want = model(**batch).logits
    monkeypatch.setattr(model.module, "run", None)
    assert_close(model(**batch, output_last_hidden_state=False).logits, want, atol=1e-6)


def test_torchscript_and_compile(place: Place, tmp_path: Path) -> None:
    reference = make_model("bert", "multiple_choice", 0)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    batch = {key: value.to(place.device) for key, value in make_batch(reference, "multiple_choice", "holes").items()}
    inputs = (batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    want = model(*inputs)
    torch.jit.script(model.module).save(str(tmp_path / "m.pt"))
    scripted = torch.jit.load(str(tmp_path / "m.pt"))
    compiled = torch.compile(model.module.forward_batch, fullgraph=True, backend="aot_eager")
    assert_close(scripted.run_first(*inputs)[1][0], want.logits, **tolerance(place))
    rows = [x.flatten(0, 1) for x in inputs]
    call = (*rows, None, 0, ["first", "pooled"])
    for result in (scripted.forward_batch(*call), compiled(*call)):
        assert_close(result[0], first_kept(want.last_hidden_state, rows[1]), **tolerance(place))
        assert_close(result[1], want.pooler_output, **tolerance(place))
    kept, cu = rows[1].bool(), torch.nn.functional.pad(rows[1].sum(1).cumsum(0), (1, 0)).int()
    packed = torch.compile(model.module.forward_packed, fullgraph=True, backend="aot_eager")
    for name, index in (("first", None), ("last", None), ("rows", some_rows(int(kept.sum()), place.device))):
        expected = scripted.forward_packed(rows[0][kept], cu, 31, want=name, rows=index)
        assert_close(packed(rows[0][kept], cu, 31, want=name, rows=index), expected, **tolerance(place), what=name)
    torch._dynamo.reset()


@pytest.mark.parametrize(("pooling", "asks", "at"), [("cls", "first", 0), ("last", "last", -1)])
def test_encode_with_a_row_of_each_text(
    tiny_bert: Callable[..., Path], tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, pooling: str, asks: str, at: int
) -> None:  # fmt: skip
    """The numbers of every token's run and of transformers, and only these rows are asked for."""
    folder = tiny_bert(tmp_path)
    model = ftbert.load(folder, device=place.device, dtype=place.dtype)
    texts = ["word1 word2 a b", "", "word3", "c " * 60]
    rows = model.encode(texts, output_value="token_embeddings", convert_to_tensor=True)
    want = torch.stack([row[at] for row in rows])
    run, asked = model.forward_packed, set[str]()

    def forward_packed(*batch: Any, want: str) -> torch.Tensor:
        asked.add(want)
        return run(*batch, want=want)

    monkeypatch.setattr(model, "forward_packed", forward_packed)
    got = model.encode(texts, pooling=pooling, normalize=False, convert_to_tensor=True)
    assert_close(got, want.to(got), **tolerance(place))
    assert asked == {asks}
    reference, tokenizer = BertModel.from_pretrained(folder), BertTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        exact = [reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, at] for text in texts]
    assert_close(got, torch.stack(exact), atol=max(2e-5, 16 * place.eps), rtol=8 * place.eps)
