"""The binding's only forward: its inputs, padded or packed, and the results that it can return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, make_bert
from families import HEADS, make_batch, make_model, packed
from torch.fx.experimental.proxy_tensor import make_fx

import ftbert

ftbert.load_library()
forward_batch = torch.ops.ftbert.forward_batch


@pytest.mark.parametrize("family, task", HEADS)
def test_heads_on_packed_rows_equal_those_on_padded(place: Place, family: str, task: str) -> None:
    model = ftbert.load(make_model(family, task, 0), device=place.device, dtype=place.dtype)
    batch = {key: value.to(place.device) for key, value in make_batch(model.reference(), task, "right").items()}
    want = model(**batch)
    ids, cu, longest, kinds = packed(batch)
    got = model.logits_packed(ids, cu, longest, kinds)
    assert len(got) == len(model.tasks)
    logits = want.pooler_output if want.logits is None else want.logits  # of text towers the first head is the pooler
    expected = logits[batch["attention_mask"].bool()] if model.heads[0].source == "tokens" else logits
    if task in ("multiple_choice", "replaced_token"):  # whose one output has no dimension there
        expected = expected.flatten()[:, None]
    assert_close(got[0], expected, atol=max(2e-5, 16 * place.eps), rtol=8 * place.eps)


def test_modules_call_the_op_where_something_watches(place: Place) -> None:
    """The class calls it through the dispatcher: wrapped tensors and modes meet an op, no pointers."""
    module = ftbert.load(make_bert(), device=place.device, dtype=place.dtype).module
    ids = torch.randint(5, 99, (2, 12), device=place.device)
    graph = make_fx(lambda x: module(x)[0])(ids)
    assert any("forward_batch" in str(node.target) for node in graph.graph.nodes)
    traced = torch.jit.trace(module, ids)
    for call in (lambda x: traced(x)[0], torch.func.functionalize(lambda x: module(x)[0]), graph):
        assert torch.equal(call(ids.flip(0)), module(ids.flip(0))[0])
    with pytest.raises(RuntimeError, match="[Bb]atching rule"):
        torch.vmap(lambda x: module(x[None])[0])(ids)


def test_every_want_padded_and_packed(place: Place) -> None:
    model = ftbert.load(make_bert(num_hidden_layers=2), device=place.device, dtype=place.dtype)
    ids = torch.randint(5, 99, (3, 20), device=place.device)
    mask = (torch.arange(20, device=place.device)[None] < torch.tensor([[20], [0], [7]], device=place.device)).long()
    out, kept = model(ids, mask), mask.bool()
    wants = ["pooled", "packed_tokens", "packed_index", "cu_seqlens", "first", "tokens", "hidden_states"]
    made = dict(zip(wants, forward_batch(model.encoder, ids, mask, None, None, 0, wants), strict=True))
    assert torch.equal(made["cu_seqlens"].cpu(), torch.tensor([0, 20, 20, 27], dtype=torch.int32))
    assert torch.equal(made["packed_index"].view(3, 20)[kept].cpu(), torch.arange(27, dtype=torch.int32))
    limit: dict[str, Any] = {"atol": max(2e-6, 32 * place.eps), "rtol": 8 * place.eps}
    assert_close(made["tokens"], out.last_hidden_state, **limit)
    assert_close(made["packed_tokens"], out.last_hidden_state[kept], **limit)
    assert_close(made["hidden_states"][-1], out.last_hidden_state, **limit)
    assert_close(made["pooled"], out.pooler_output, **limit)
    first = torch.stack([out.last_hidden_state[0, 0], torch.zeros_like(out.last_hidden_state[0, 0]), out.last_hidden_state[2, 0]])
    assert_close(made["first"], first, **limit)

    flat, cu = ids[kept], made["cu_seqlens"]
    wants.remove("packed_index")
    alike = dict(zip(wants, forward_batch(model.encoder, flat, None, None, cu, 20, wants), strict=True))
    for name in ("pooled", "packed_tokens", "first", "cu_seqlens"):
        assert_close(alike[name], made[name], **limit, what=name)
    assert_close(alike["tokens"], made["packed_tokens"], **limit)
    assert_close(alike["hidden_states"], made["hidden_states"][:, kept], **limit)


def test_results_have_memory_of_their_own(place: Place) -> None:
    encoder = ftbert.load(make_bert(), device=place.device, dtype=place.dtype).encoder
    ids, cu = torch.randint(5, 99, (40,), device=place.device), torch.tensor([0, 30, 40], dtype=torch.int32, device=place.device)
    wants = ["tokens", "packed_tokens", "cu_seqlens", "first", "pooled", "tokens", "hidden_states"]
    for made in (
        forward_batch(encoder, ids, None, None, cu, 30, wants),
        forward_batch(encoder, ids.view(2, 20), None, None, None, 0, [*wants, "packed_index"]),
    ):
        assert len({tensor.untyped_storage().data_ptr() for tensor in [*made, ids, cu]}) == len(made) + 2


def test_wrong_wants_are_errors() -> None:
    encoder = ftbert.load(make_bert()).encoder
    ids, cu = torch.randint(5, 99, (2, 6)), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="want: expected some of tokens, packed_tokens, .*, got 'logits'"):
        forward_batch(encoder, ids, None, None, None, 0, ["tokens", "logits"])
    with pytest.raises(RuntimeError, match="attention_mask: packed ids .* have none"):
        forward_batch(encoder, ids[0], torch.ones_like(ids), None, cu, 6, ["tokens"])
    with pytest.raises(RuntimeError, match="packed_index is of padded ids"):
        forward_batch(encoder, ids[0], None, None, cu, 6, ["packed_index"])
    with pytest.raises(ValueError, match="no head"):
        ftbert.load(make_bert()).logits_packed(ids[0], cu, 6)
    assert forward_batch(encoder, ids, None, None, None, 0, []) == []


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_storage_type_without_a_product_is_refused(place: Place, stored: torch.dtype) -> None:
    encoder = ftbert.load(make_bert(), device=place.device, dtype=place.dtype).encoder
    weights = dict(encoder.weights())
    matrices = [name for name, tensor in weights.items() if tensor.dim() == 2 and not name.startswith("embeddings")]
    for name in matrices:
        weights[name] = (weights[name] * 100).to(stored)
    word = "e4m3" if stored is torch.float8_e4m3fn else "int8"
    with pytest.raises(RuntimeError, match=f"no product on {place.device} multiplies .* by a matrix stored as {word}"):
        torch.classes.ftbert.Encoder(weights, encoder.config(), "auto")
