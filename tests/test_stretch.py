"""Rotary frequencies that depend on a text's own length: rope_type "dynamic", nomic's rotary_scaling_factor."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_no_worse, assert_same
from conftest import Place
from families import make_model
from tokenizers_offline import TEXTS, sentence_folder

import ftbert
from ftbert.checkpoint import ModelConfig
from ftbert.converters import convert

TRAINED, FACTOR = 16, 3.0
LENGTHS = [5, 16, 17, 31, 48, 0, 24]
ROPE = {"rope_type": "dynamic", "factor": FACTOR, "rope_theta": 1000.0}


def stretched(family: str = "nomic_bert", **more: Any) -> Any:
    """With heads of 32, which the fused attention of GPUs takes."""
    sizes = {"hidden_size": 96, "max_position_embeddings": TRAINED, "rope_parameters": ROPE}
    return make_model(family, "encoder", 0, **sizes | more)


def alone(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] of transformers for one text, whose frequencies a shorter one before has made anew."""
    with torch.no_grad():
        reference(torch.full((1, 3), 7, device=ids.device))
        return reference(ids[None]).last_hidden_state[0]  # type: ignore[no-any-return]


def rows_of(generator: torch.Generator, vocab: int) -> list[torch.Tensor]:
    return [torch.randint(5, vocab, (n,), generator=generator) for n in LENGTHS]


@pytest.mark.parametrize("family", ["nomic_bert", "jina_embeddings_v3", "eurobert"])
@pytest.mark.parametrize("attention", ["fused", "general"])
def test_each_text_has_the_frequencies_of_its_own_length(place: Place, family: str, attention: str) -> None:
    reference = stretched(family)
    model = ftbert.load(reference, place.device, place.dtype, attention=attention)
    assert model.config.max_seq == TRAINED * FACTOR
    rows = rows_of(torch.Generator().manual_seed(0), reference.config.vocab_size)
    want = [alone(reference, row) if len(row) else torch.empty(0, model.config.hidden) for row in rows]
    theirs = copy.deepcopy(reference).to(place.device, place.dtype)
    rounded = [alone(theirs, row.to(place.device)).float().cpu() if len(row) else want[at] for at, row in enumerate(rows)]

    def check(got: list[torch.Tensor], tokens: slice, what: str) -> None:
        ours, expected = (torch.cat([one[tokens] for one in texts]) for texts in (got, want))
        if place.dtype == torch.float32:
            assert_close(ours, expected, atol=2e-5 if place.device == "cpu" else 5e-5, what=what)
        else:
            assert_no_worse(ours, torch.cat([one[tokens] for one in rounded]), expected)

    longest = max(LENGTHS)
    for side in ("right", "left", "holes"):
        ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
        for at, row in enumerate(rows):
            here = torch.arange(len(row)) + (longest - len(row) if side == "left" else 0)
            if side == "holes" and len(row) == 5:
                here = here + 2  # a text behind tokens that do not count: distances are the same
            ids[at, here], mask[at, here] = row, 1
        got = model(ids.to(place.device), mask.to(place.device)).last_hidden_state.float().cpu()
        check([got[at][mask[at].bool()] for at in range(len(rows))], slice(None), side)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    packed = torch.cat(rows).to(place.device), cu.to(place.device), longest
    check(list(model.forward_packed(*packed).float().cpu().split(LENGTHS)), slice(None), "packed")
    first = model.forward_packed(*packed, want="first").float().cpu()
    assert not first[LENGTHS.index(0)].any()
    check([first[at : at + 1] if len(row) else want[at] for at, row in enumerate(rows)], slice(1), "first tokens")
    with pytest.raises(RuntimeError, match="sequence of 49 tokens: the model has positions for 48"):
        model(torch.full((1, 49), 7, device=place.device))


def test_short_texts_have_the_table_of_all_others() -> None:
    """Bit by bit: a text up to the trained length knows nothing of the rule."""
    reference = stretched()
    plain = stretched(rope_parameters=ROPE | {"rope_type": "default"})
    ids = torch.randint(5, 90, (3, TRAINED), generator=torch.Generator().manual_seed(1))
    assert torch.equal(ftbert.load(reference)(ids).last_hidden_state, ftbert.load(plain)(ids).last_hidden_state)


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    model = ftbert.load(stretched())
    rows = [row for row in rows_of(torch.Generator().manual_seed(2), 90) if len(row)]
    for row in rows:
        whole = model(row[None]).last_hidden_state[0]
        for other in rows:
            cu = torch.tensor([0, len(other), len(other) + len(row)], dtype=torch.int32)
            both = model.forward_packed(torch.cat([other, row]), cu, max(len(row), len(other)))
            assert_close(both[len(other) :], whole, atol=2e-6)


def published(folder: Path, **more: Any) -> Any:
    """A sentence-transformers folder of nomic-embed-text's kind; transformers' model of it."""
    reference = stretched(hidden_act="silu", vocab_size=300, hidden_size=64, head_dim=16, num_attention_heads=4)
    sentence_folder(folder, model=reference)
    config = {
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "layer_norm_epsilon": reference.config.layer_norm_eps,
        "max_trained_positions": TRAINED, "model_type": "nomic_bert", "n_embd": 64, "n_head": 4,
        "n_inner": reference.config.intermediate_size, "n_layer": reference.config.num_hidden_layers, "n_positions": 48,
        "rotary_emb_base": 1000, "rotary_scaling_factor": FACTOR, "type_vocab_size": reference.config.type_vocab_size,
        "vocab_size": 300,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | more))
    return reference


def test_nomic_as_published(tmp_path: Path) -> None:
    reference = published(tmp_path / "nomic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ftbert.load(tmp_path / "nomic")
    assert model.max_seq_length == 48
    rows = model.preprocess(TEXTS)
    want = torch.stack([alone(reference, ids[mask.bool()]).mean(0) for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)])
    assert int(rows["attention_mask"].sum(1).max()) > TRAINED
    want = torch.nn.functional.normalize(want).numpy()
    assert_same(model.encode(TEXTS), want)
    assert_same(ftbert.load(convert(tmp_path / "nomic", tmp_path / "copy")).encode(TEXTS), want)
    assert type(model.reference()) is type(reference)
    assert ftbert.load(published(tmp_path / "short", n_positions=20) and tmp_path / "short").max_seq_length == 20
    published(tmp_path / "wrong", rotary_scaling_factor=-1)
    with pytest.raises(ValueError, match="factor: expected a number above 0"):
        ftbert.load(tmp_path / "wrong")


def test_optimize() -> None:
    reference = stretched()
    rows = rows_of(torch.Generator().manual_seed(0), 90)
    want = alone(reference, rows[3])
    with torch.no_grad():
        assert_close(ftbert.optimize(reference)(rows[3][None]).last_hidden_state[0], want, atol=2e-5)


def test_what_is_refused() -> None:
    described = json.loads(ftbert.load(stretched()).config.text())
    rotary = described["layer"]["attention"]["rotary"]
    for change, words in [
        ({"factor": 0}, "stretch.factor"), ({"trained": 0}, "stretch.trained"), ({"more": 1}, "stretch.more"),
    ]:  # fmt: skip
        wrong = {"attention": {**described["layer"]["attention"], "rotary": {**rotary, "stretch": {**rotary["stretch"], **change}}}}
        with pytest.raises(ValueError, match=words):
            ModelConfig.from_json(described | {"layer": described["layer"] | wrong})
    two = [{}, {"attention": {"rotary": {"stretch": {"factor": 2.0, "trained": TRAINED}}}}]
    with pytest.raises(ValueError, match="rotary positions that follow a sequence's length in some layers alone"):
        ModelConfig.from_json(described | {"layers": two}).weight_specs()
