"""Every family and head against transformers in float32, and what only some of them have."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_no_worse
from conftest import Place, randomise
from families import CASES, SIZES, make_batch, make_config, make_model, masks_of, packed
from safetensors.torch import load_file, save_file

import ftbert
from ftbert.converters.families import FAMILIES
from ftbert.converters.from_huggingface import convert


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to share: waiting for a second thread takes longer than what it would do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def to(batch: dict[str, torch.Tensor], place: Place) -> dict[str, torch.Tensor]:
    return {key: value.to(place.device) for key, value in batch.items()}


def moved(reference: Any, place: Place) -> Any:
    """A copy on a GPU: what a model was made of stays where it is."""
    return reference if place.device == "cpu" else copy.deepcopy(reference).to(place.device)


@torch.no_grad()
def check(reference: Any, model: ftbert.Model, batch: dict[str, torch.Tensor], place: Place) -> None:
    """Every field that transformers gives, where it means something: valid tokens, sequences whose token that is read is kept.

    fp32: absolute. 16 bit: the hidden state no worse than 1.25x transformers' own in that dtype, the rest roughly.
    """
    batch = to(batch, place)
    got = dict(model(**batch))
    kept = batch["attention_mask"].bool()
    if "causal_lm" in [head.task for head in model.checkpoint.config.heads]:
        assert "logits" not in got
        logits = model.head("causal_lm")(got["last_hidden_state"][kept], model.encoder.weight("embeddings.word"))
        got["logits"] = logits.new_zeros(*kept.shape, logits.shape[-1])
        got["logits"][kept] = logits
    kept = kept.view(-1, kept.shape[-1])
    first = kept[:, 0]
    if [head.source for head in model.heads] == ["last"]:  # the last id that is no padding, masked or not
        first = kept[:, -1] | (batch["input_ids"][:, -1] == reference.config.pad_token_id)
    if ends := [head.end_id for head in model.heads if head.source == "end"]:
        ids = batch["input_ids"]
        first = kept.gather(1, (ids if ends[0] < 0 else (ids == ends[0]).int()).argmax(1, keepdim=True))[:, 0]
    if [(head.task, head.source) for head in model.heads] == [("pooled", "last")]:
        first = kept[:, -1]  # transformers reads the last column, which may be padding
    wanted = dict(reference.float()(**batch))
    base = getattr(reference, reference.base_model_prefix, reference)
    flat = {key: value.view(kept.shape) for key, value in batch.items()}
    wanted["last_hidden_state"] = base(**flat).last_hidden_state
    fp32 = place.dtype == torch.float32
    limit = (3e-5 if place.device == "cpu" else 5e-5) if fp32 else 128 * place.eps
    for name, want in wanted.items():
        ours = got[name]
        assert ours.shape == want.shape and ours.dtype == place.dtype, name
        if want.shape[:2] == kept.shape:
            assert not ours[~kept].any(), f"{name}: rows at padding must be 0"
            rows = kept
        else:
            ours, want = (x.reshape(len(kept), -1) for x in (ours, want))
            rows = first
        assert want.abs().max() > 0.01, f"{name}: a test of zeros shows nothing"
        assert_close(ours[rows], want[rows], atol=limit, rtol=0 if fp32 else 64 * place.eps, what=name)
    if not fp32:
        theirs = base.to(place.dtype)(**flat).last_hidden_state[kept]
        assert_no_worse(got["last_hidden_state"][kept], theirs, wanted["last_hidden_state"][kept])
        base.float()


def check_hidden_states(reference: Any, model: ftbert.Model, task: str, place: Place) -> None:
    """Also where LayerNorm comes first: there transformers' last one is after the final norm, the others before any."""
    model.use_cuda_graphs(False)  # the op runs directly; a recording may serve a longer length (test_replay.py)
    batch = to(make_batch(reference, task, masks_of(reference)[-1]), place)
    kept = batch["attention_mask"].flatten(0, -2).bool()
    out = model(**batch, output_hidden_states=True)
    got = out.hidden_states
    with torch.no_grad():
        want = reference(**batch, output_hidden_states=True).hidden_states
    assert isinstance(got, tuple) and len(got) == len(want)
    # The mask on the CPU: the tokens are counted first, here as there. Without states LayerNorms may be deferred.
    alone = model(**batch | {"attention_mask": batch["attention_mask"].cpu()})
    deferred = place.device == "cuda" and place.dtype != torch.float32
    assert alone.get("hidden_states") is None and set(out) == {*alone, "hidden_states"}
    for name, value in alone.items():
        assert_close(out[name], value, atol=32 * place.eps if deferred else 0, what=name)
    if not model.config.states_before_final_norm:
        assert_close(got[-1], out.last_hidden_state, atol=0, what="last state")
    limit = 3e-5 if place == Place("cpu", torch.float32) else max(5e-5, 128 * place.eps)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.shape == other.shape and one.dtype == place.dtype and not one[~kept].any()
        assert_close(one[kept], other[kept], atol=limit, rtol=64 * place.eps, what=f"hidden state {i}")
    short = model(**batch, output_hidden_states=True, output_last_hidden_state=False)
    assert short.last_hidden_state is None and torch.equal(short.hidden_states[-1], got[-1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("family", "task"), CASES)
def test_equals_transformers(place: Place, family: str, task: str, size: int) -> None:
    original = make_model(family, task, size)
    model = ftbert.load(original, device=place.device, dtype=place.dtype)
    assert task in (*model.tasks, "encoder", "causal_lm") and len(model.tasks) <= 2
    reference = moved(original, place)
    for mask in masks_of(reference):
        check(reference, model, make_batch(reference, task, mask), place)
    check_hidden_states(moved(original, place), model, task, place)  # in 16 bits `check` has rounded its weights


@pytest.mark.parametrize("family", ["bert", "ernie", "megatron-bert"])
def test_pretraining_models_have_two_heads(place: Place, family: str) -> None:
    import transformers

    kind = getattr(transformers, type(make_model(family, "masked_lm", 0)).__name__.replace("MaskedLM", "PreTraining"))
    reference = randomise(kind(make_config(family, 0)))
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    assert model.tasks == ["masked_lm", "next_sentence"]
    reference = moved(reference, place)
    check(reference, model, make_batch(reference, "masked_lm", "right"), place)
    assert type(model.reference()) is kind


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", [family for family, task in CASES if task == "masked_lm"])
def test_language_models_that_are_no_decoders(place: Place, tmp_path: Path, family: str, size: int) -> None:
    """transformers' decoder class as an encoder: without is_decoder nothing about it is causal."""
    from transformers import AutoModelForCausalLM

    config = make_config(family, size)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip("transformers has none")
    reference = randomise(AutoModelForCausalLM.from_config(config))
    reference.save_pretrained(tmp_path)
    reference = reference.to(place.device)
    for source in (reference, tmp_path):
        model = ftbert.load(source, device=place.device, dtype=place.dtype)
        assert model.tasks == ["masked_lm"]
        for mask in masks_of(reference):
            check(reference, model, make_batch(reference, "masked_lm", mask), place)


# ---- convert, load, and back ---------------------------------------------------------------------------------------


def test_convert_replaces_only_what_it_wrote(tmp_path: Path) -> None:
    theirs, ours, precious = tmp_path / "theirs", tmp_path / "ours", tmp_path / "precious"
    make_model("bert", "encoder", 1).save_pretrained(theirs)
    before = sorted(path.name for path in theirs.iterdir())
    precious.mkdir()
    (precious / "data.txt").write_text("x")
    for target in (theirs, tmp_path):
        with pytest.raises(ValueError, match="holds the source"):
            convert(theirs, target, force=True)
    with pytest.raises(FileExistsError, match="no checkpoint folder of ftbert"):
        convert(theirs, precious, force=True)
    assert sorted(path.name for path in theirs.iterdir()) == before and (precious / "data.txt").exists()
    ours.mkdir()
    for force in (False, True):  # an empty folder, then what is in it now
        convert(theirs, ours, force=force)
    with pytest.raises(FileExistsError, match="--force"):
        convert(theirs, ours)
    ftbert.load(ours)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_round_trip(tmp_path: Path, family: str, task: str) -> None:
    """HuggingFace folder -> ftbert folder -> transformers again, all giving the same."""
    reference = make_model(family, task, 1)
    batch = make_batch(reference, task, "right")
    reference.save_pretrained(tmp_path / "theirs")
    place = Place("cpu", torch.float32)
    converted = ftbert.load(convert(tmp_path / "theirs", tmp_path / "ours"))
    check(reference, converted, batch, place)
    back = converted.reference()
    others = ("masked_lm", "next_sentence", "sentence_order", "causal_lm")
    assert type(back).__name__ == type(reference).__name__ or task in others
    check(back, converted, batch, place)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "albert", "electra"])
@pytest.mark.parametrize("say", ["", "tie_word_embeddings is true"])
def test_an_untied_decoder(tmp_path: Path, family: str, say: str) -> None:
    reference = make_model(family, "masked_lm", 0, tie_word_embeddings=False)
    reference.config.tie_word_embeddings = bool(say)  # a file whose decoder differs is right whatever its config says
    reference.save_pretrained(tmp_path)
    model = ftbert.load(tmp_path)
    assert not model.checkpoint.config.heads[0].tied
    batch = make_batch(reference, "masked_lm", "right")
    check(reference, model, batch, Place("cpu", torch.float32))
    check(model.reference(), model, batch, Place("cpu", torch.float32))


HEAD_ALONE = {
    "bert": ("masked_lm", "cls.predictions.decoder"), "roberta": ("masked_lm", "lm_head.decoder"), "electra": ("masked_lm", "generator_lm_head"),
    "modernbert": ("masked_lm", "decoder"), "llama": ("causal_lm", "lm_head"), "gemma3_text": ("causal_lm", "lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("family", HEAD_ALONE)
def test_a_tied_matrix_under_its_heads_name_alone(tmp_path: Path, family: str) -> None:
    task, head = HEAD_ALONE[family]
    reference = make_model(family, task, 0, tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (word,) = (name for name in state if name.endswith(("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")))
    state[f"{head}.weight"] = state.pop(word)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = ftbert.load(tmp_path)
    assert model.checkpoint.config.heads[0].tied
    check(reference, model, make_batch(reference, task, "right"), Place("cpu", torch.float32))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=rf"model.safetensors: .*\n  missing {word}"):
        ftbert.load(tmp_path)


def test_a_head_without_its_class_name(tmp_path: Path) -> None:
    """Where config.json names no class, tensors that only one head has are enough; others are left out."""
    for family, task, tasks in [
        ("roberta", "sequence_classification", ["sequence_classification"]),
        ("bert", "masked_lm", ["masked_lm"]),
        ("bert", "question_answering", ["question_answering"]),
        ("bert", "token_classification", []),  # `classifier` could be three heads
    ]:
        reference = make_model(family, task, 0)
        reference.save_pretrained(tmp_path / task)
        path = tmp_path / task / "config.json"
        path.write_text(path.read_text().replace('"architectures"', '"unused"'))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert ftbert.load(tmp_path / task).tasks == tasks
        left = r"the task head is left out \(classifier\..*\): its config names no class"
        assert [bool(re.search(left, str(one.message))) for one in said] == ([] if tasks else [True])


def test_an_encoder_that_says_it_has_a_head(tmp_path: Path) -> None:
    """all-mpnet-base-v2 says MPNetForMaskedLM and holds the encoder alone."""
    reference = make_model("mpnet", "encoder", 0)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"MPNetModel"', '"MPNetForMaskedLM"'))
    model = ftbert.load(tmp_path)
    assert model.tasks == []
    check(reference, model, make_batch(reference, "encoder", "right"), Place("cpu", torch.float32))


# ---- what only some have -------------------------------------------------------------------------------------------


def test_shared_layers_are_stored_once(tmp_path: Path) -> None:
    model = ftbert.load(make_model("albert", "encoder", 1))
    assert [layer.weights_of for layer in model.config.layers] == [0, 0, 1, 1]
    names = set(model.encoder.weights())
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1"}
    assert set(dict(model.checkpoint.items())) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(place: Place, family: str) -> None:
    reference = make_model(family, "encoder", 1)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    batch = to(make_batch(reference, "encoder", "right"), place)
    kept = batch["attention_mask"].bool()
    assert torch.equal(model.forward_packed(*packed(batch)), model(**batch).last_hidden_state[kept])


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
@pytest.mark.parametrize("family", ["t5", "umt5", "esm", "clip_text_model", "siglip_text_model"])
def test_cpus_share_a_model(family: str, parallel: str) -> None:
    """Tables of biases by layer, factors by sequence and states before the final norm, in shares and stages."""
    reference = make_model(family, "encoder", 2)
    batch = make_batch(reference, "encoder", "holes")
    want = ftbert.load(reference)(**batch, output_hidden_states=True)
    got = ftbert.load(reference, device=["cpu", "cpu"], parallel=parallel)(**batch, output_hidden_states=True)
    for one, other in zip(got.hidden_states, want.hidden_states, strict=True):
        assert_close(one, other, atol=2e-5)
    assert_close(got.last_hidden_state, want.last_hidden_state, atol=2e-5)


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_masked_lm_logits_at_positions(place: Place, family: str) -> None:
    model = ftbert.load(make_model(family, "masked_lm", 0), device=place.device, dtype=place.dtype)
    batch = to(make_batch(model.reference(), "masked_lm", "holes"), place)
    batch.pop("token_type_ids", None)
    positions = batch["attention_mask"].bool() & (batch["input_ids"] % 3 == 0)
    got = model.masked_lm_logits(**batch, positions=positions)
    assert got.shape == (int(positions.sum()), 96)
    # Another number of rows may be summed in another order.
    assert_close(got, model(**batch).logits[positions], atol=max(2e-6, 16 * place.eps), rtol=8 * place.eps)
    for wrong in (positions.long(), positions.T):
        with pytest.raises((RuntimeError, ValueError), match="positions: expected bool, of the shape of input_ids"):
            model.masked_lm_logits(**batch, positions=wrong)
    with pytest.raises((RuntimeError, ValueError), match="expected valid tokens, got one at padding"):
        model.masked_lm_logits(**batch, positions=batch["attention_mask"] == 0)
    with pytest.raises(ValueError, match="no masked language model head"):
        ftbert.load(make_model(family, "encoder", 0)).masked_lm_logits(batch["input_ids"], positions=positions)


@pytest.mark.parametrize("task", ["encoder", "sequence_classification", "question_answering", "multiple_choice"])
def test_outputs_go_through_pickle(task: str) -> None:
    """As from a worker process."""
    reference = make_model("bert", task, 1)
    out = ftbert.load(reference)(**make_batch(reference, task, "right"))
    for back in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert type(back) is type(out) and list(back) == list(out)
        assert all(torch.equal(back[name], out[name]) for name in out)


@pytest.mark.parametrize("task", ["encoder", "sequence_classification", "masked_lm", "multiple_choice"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_torchscript(place: Place, tmp_path: Path, family: str, task: str) -> None:
    reference = make_model(family, task, 1)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    torch.jit.script(model.module).save(str(tmp_path / "m.pt"))
    scripted = torch.jit.load(str(tmp_path / "m.pt"))
    batch = to(make_batch(reference, task, "holes"), place)
    got = scripted(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
    out = model(**batch)
    assert torch.equal(got[0], out.last_hidden_state)
    if task != "encoder":
        assert torch.equal(got[2], out.logits)


def test_empty_rows_and_batches(place: Place) -> None:
    for family, task in CASES:
        some = ("bert", "mpnet", "megatron-bert", "umt5", "esm", "clip_text_model", "siglip_text_model")
        bare = ("deberta", "deberta-v2", "roformer", "alibi_bert", "neobert", "modernbert-decoder")
        if task == "multiple_choice" or not (family in some or (family in bare and task == "encoder")):
            continue
        model = ftbert.load(make_model(family, task, 0), device=place.device, dtype=place.dtype)
        ids = torch.full((3, 4), 7, device=place.device)
        mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], device=place.device)
        out = model(ids, mask)
        assert not out.last_hidden_state[1].any() and out.last_hidden_state[2].any()
        assert out.pooler_output is None or (not out.pooler_output[1].any() and out.pooler_output[2].any())
        assert all(value.isfinite().all() for value in out.values())
        nothing = model(ids, mask * 0)
        assert not nothing.last_hidden_state.any() and all(value.isfinite().all() for value in nothing.values())
        for none in (ids[:0], ids[:, :0]):
            assert model(none).last_hidden_state.shape == (*none.shape, 48)
            call = (model.encoder, none, None, None, None, 0, ["hidden_states"])
            assert torch.ops.ftbert.forward_batch(*call)[0].shape == (model.config.depth + 1, *none.shape, 48)


# ---- tensors that are left over -------------------------------------------------------------------------------------

OUTSIDE = ("fit_denses.0.weight", "linear.weight", "crf.transitions", "loss_fct.weight", "vocab_extra")


@pytest.mark.parametrize("task", ["encoder", "sequence_classification"])
def test_what_stands_outside_the_encoder_is_left_out_with_one_warning(tmp_path: Path, task: str) -> None:
    reference = make_model("bert", task, 0)
    reference.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(3) for name in OUTSIDE}, path, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="outside the encoder is left out"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    # transformers ignores the same names
    info = type(reference).from_pretrained(tmp_path / "theirs", output_loading_info=True)[1]
    assert set(info["unexpected_keys"]) == set(OUTSIDE) and not info["missing_keys"]
    for source in (tmp_path / "theirs", tmp_path / "ours"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = ftbert.load(source)
        [one] = said
        assert "and 1 more" in str(one.message) and sum(name in str(one.message) for name in OUTSIDE) == 4
        check(reference, model, make_batch(reference, task, "right"), Place("cpu", torch.float32))


# ---- a converted folder and transformers ----------------------------------------------------------------------------


def test_transformers_takes_no_converted_folder_for_its_own(tmp_path: Path) -> None:
    from transformers import AutoModel

    make_model("bert", "encoder", 0).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "bert")
    with pytest.raises(ValueError, match="bert. Should have a `model_type` key in its config.json"):
        AutoModel.from_pretrained(tmp_path / "bert")
    assert "reference().save_pretrained" in json.loads((tmp_path / "bert" / "config.json").read_text())["note"]


@pytest.mark.parametrize(
    ("family", "task"), [case for case in CASES if case[1] in ("encoder", "masked_lm", "sequence_classification")]
)
def test_a_converted_folder_becomes_transformers_own_again(tmp_path: Path, family: str, task: str) -> None:
    """reference().save_pretrained: the same tensors bit for bit, which transformers loads without a missing one."""
    make_model(family, task, 0).save_pretrained(tmp_path / "theirs")
    ours = ftbert.load(convert(tmp_path / "theirs", tmp_path / "ours"))
    reference = ours.reference()
    reference.save_pretrained(tmp_path / "again")
    loaded, info = type(reference).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = ftbert.load(tmp_path / "again")
    assert again.tasks == ours.tasks
    for name in ours.checkpoint.tensors:
        assert torch.equal(again.checkpoint.read(name), ours.checkpoint.read(name)), name
    check(loaded.eval(), ours, make_batch(reference, task, "right"), Place("cpu", torch.float32))
