"""ESM's proteins: token dropout, frequencies of files, contacts; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_no_worse
from conftest import Place
from families import make_batch, make_config, make_model, packed
from safetensors.torch import load_file, save_file

import ftbert
from ftbert.converters.families import FAMILIES
from ftbert.converters.from_huggingface import convert

MASK = 4


def masked(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With other shares of masked ids in the rows, none of them at padding."""
    ids = batch["input_ids"].clone()
    for row, step in enumerate((2, 9, 3, 5)):
        some = batch["attention_mask"][row].nonzero()[::step][1:]
        ids[row, some] = MASK
    return batch | {"input_ids": ids}


@pytest.mark.parametrize("task", ["encoder", "masked_lm"])
@pytest.mark.parametrize("mask", ["right", "left", "holes"])
@torch.no_grad()
def test_token_dropout_counts_the_masked_tokens_of_a_sequence(place: Place, task: str, mask: str) -> None:
    reference = make_model("esm", task, 0)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    assert model.config.token_dropout is not None and model.config.token_dropout.mask_id == MASK
    batch = masked(make_batch(reference, "encoder", mask))
    assert len(set((batch["input_ids"] == MASK).sum(1).tolist())) > 2
    kept = batch["attention_mask"].bool()
    want = reference(**batch)[0][kept]
    there = {name: tensor.to(place.device) for name, tensor in batch.items()}
    got = (model(**there).logits if task == "masked_lm" else model(**there).last_hidden_state)[kept.to(place.device)]
    if place.dtype == torch.float32:
        assert_close(got, want.to(place.device), atol=5e-5)
    elif task == "encoder":
        half = reference.to(place.device, place.dtype)(**there)[0][kept.to(place.device)]
        assert_no_worse(got, half, want.to(place.device))


def test_packed_rows_padding_and_neighbours(place: Place) -> None:
    model = ftbert.load(make_model("esm", "encoder", 0), device=place.device, dtype=place.dtype)
    plain = masked(make_batch(model.reference(), "encoder", "right"))
    batch = {name: tensor.to(place.device) for name, tensor in plain.items()}
    kept = batch["attention_mask"].bool()
    out = model(**batch).last_hidden_state
    assert torch.equal(model.forward_packed(*packed(batch)), out[kept])
    other = batch | {"input_ids": torch.where(kept, batch["input_ids"], MASK)}  # masked ids at padding do not count
    assert torch.equal(model(**other).last_hidden_state, out)
    for row in range(4):
        one = model(*(tensor[row : row + 1] for tensor in batch.values())).last_hidden_state
        assert_close(one[0], out[row], atol=max(2e-6, 16 * place.eps))
    other["input_ids"][1] = MASK  # all of them: transformers divides by 0
    assert model(**other).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("where", ["rotary_embeddings.inv_freq", "encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"])
def test_frequencies_of_a_file_count(tmp_path: Path, where: str) -> None:
    """Older files have them in every layer; some were rounded to fp16 when the model was trained."""
    from transformers import EsmModel

    reference = make_model("esm", "encoder", 2)
    reference.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    state = load_file(path)
    names = [name for name in state if name.endswith("inv_freq")]  # transformers writes one with a `*` for the layer
    [rounded] = [state.pop(name).half().float() * 1.01 for name in names]
    state |= {where.format(i): rounded.clone() for i in range(2)}
    save_file(state, path, metadata={"format": "pt"})
    theirs = EsmModel.from_pretrained(tmp_path / "theirs").eval()
    batch = make_batch(reference, "encoder", "right")
    kept = batch["attention_mask"].bool()
    want = theirs(**batch).last_hidden_state[kept]
    assert (want - reference(**batch).last_hidden_state[kept]).abs().max() > 1e-3
    for place in (tmp_path / "theirs", convert(tmp_path / "theirs", tmp_path / "ours")):
        model = ftbert.load(place)
        assert_close(model(**batch).last_hidden_state[kept], want, atol=3e-5)
        assert_close(model.reference()(**batch).last_hidden_state[kept], want, atol=3e-5)


def test_plain_frequencies_stay_a_theta() -> None:
    rotary = ftbert.load(make_model("esm", "encoder", 0)).config.layers[0].attention.rotary
    assert rotary is not None and rotary.theta == 10_000


def test_contacts_run_the_original() -> None:
    model = make_model("esm", "masked_lm", 0, attn_implementation="eager")  # sdpa gives no weights
    batch = make_batch(model, "encoder", "right")
    with torch.no_grad():
        want = model.predict_contacts(batch["input_ids"], batch["attention_mask"])
        logits = model(**batch).logits
        ftbert.optimize(model)
        with pytest.warns(UserWarning, match="output_attentions"):
            got = model.predict_contacts(batch["input_ids"], batch["attention_mask"])
        kept = batch["attention_mask"].bool()
        assert_close(model(**batch).logits[kept], logits[kept], atol=1e-4)
    assert torch.equal(got.nan_to_num(), want.nan_to_num()) and want.isfinite().any()
    assert list(model.esm.forward.fallbacks.values()) == [1]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"mask_token_id": None}, "mask_token_id None: token_dropout needs the id of masked tokens"),
        ({"mask_token_id": 96}, "mask_token_id 96: token_dropout needs the id of masked tokens"),
        ({"is_folding_model": True}, "is_folding_model true is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"position_embedding_type": "absolute", "pad_token_id": None}, "pad_token_id null: positions of a table count from it"),
        ({"is_decoder": True}, "this checkpoint is a decoder"),
    ],
    ids=str,
)
def test_a_config_that_cannot_run_is_refused(said: dict[str, Any], words: str) -> None:
    config = make_config("esm", 0).to_dict()
    FAMILIES["esm"].config(config)
    with pytest.raises(ValueError, match=words):
        FAMILIES["esm"].config(config | said)


def test_a_sequence_longer_than_the_table_is_refused() -> None:
    model = ftbert.load(make_model("esm", "encoder", 1))
    with pytest.raises(RuntimeError, match="the model has positions for 51"):
        model(torch.full((1, 52), 7))
