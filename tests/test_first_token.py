"""The last layer for the first token of each sequence alone: what it gives is what the whole last layer gives there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import first_kept, ragged
from compare import assert_close
from conftest import Place, first_of
from families import CASES, make_batch, make_model

import ftbert

# LayerNorm after and before, a relative bias, projected embeddings, shared layers, positions counted from padding.
FAMILIES = ["bert", "megatron-bert", "xlm-roberta-xl", "mpnet", "electra", "albert", "roberta"]
MASKS = ["full", "right", "left", "holes", "mostly empty"]


def tolerance(place: Place) -> dict[str, float]:
    """Another number of rows may be summed in another order."""
    if place.dtype == torch.float32:
        return {"atol": 1e-6 if place.device == "cpu" else 4e-6, "rtol": 1e-6}
    return {"atol": 16 * place.eps, "rtol": 16 * place.eps}


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
    for result in first_of(model.module, ids, mask * 0):
        assert not result.any()
    assert first_of(model.module, ids[:0])[0].shape == (0, 48)


@pytest.mark.parametrize("family", ["bert", "megatron-bert", "mpnet"])
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
    want = torch.ops.ftbert.first_rows(model.forward_packed(ids[kept], cu, longest), cu)
    assert_close(packed, want, **tolerance(place))


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
    expected = scripted.forward_packed(rows[0][kept], cu, 31, want="first")
    assert_close(packed(rows[0][kept], cu, 31, want="first"), expected, **tolerance(place))
    torch._dynamo.reset()


def test_encode_with_cls_pooling(
    tiny_bert: Callable[..., Path], tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of every token's run, and only first tokens are asked for."""
    model = ftbert.load(tiny_bert(tmp_path), device=place.device, dtype=place.dtype)
    texts = ["word1 word2 a b", "", "word3", "c " * 60]
    rows = model.encode(texts, output_value="token_embeddings", convert_to_tensor=True)
    want = torch.stack([row[0] for row in rows])
    run, asked = model.forward_packed, set[str]()

    def forward_packed(*batch: Any, want: str) -> torch.Tensor:
        asked.add(want)
        return run(*batch, want=want)

    monkeypatch.setattr(model, "forward_packed", forward_packed)
    got = model.encode(texts, pooling="cls", normalize=False, convert_to_tensor=True)
    assert_close(got, want.to(got), **tolerance(place))
    assert asked == {"first"}
