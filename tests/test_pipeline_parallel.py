"""A model whose layers lie on several devices, one stage after another, against the same model on one device.

Here the stages are in one process. Those of several processes: test_process_ranks.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, has_bf16, make_bert
from families import LAYERED, make_batch, make_model, masks_of
from language_models import FAMILIES as DECODERS
from language_models import assert_same_decoders, made, run
from ranks import places_of, shared_model, task_of

import ftbert
from ftbert import cli
from ftbert.checkpoint import ModelConfig, stages_of
from ftbert.converters import open_checkpoint
from ftbert.decoding.decoder import decoder_of

WANTS = ["tokens", "packed_tokens", "cu_seqlens", "first", "last", "pooled", "hidden_states", "tokens"]
HERE = ("", "", False, "")  # all stages in this process: no group, nothing to compare


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def limit(place: Place) -> float:
    """On the CPU the same kernels compute the same rows; on a GPU a norm between two stages is a kernel of its own."""
    return 2e-6 if place.device == "cpu" else 2e-5 if place.dtype == torch.float32 else 64 * place.eps


def both(source: Any, place: Place, stages: int, **given: Any) -> tuple[ftbert.Model, ftbert.Model]:
    places = places_of(place, stages)
    given = {"dtype": place.dtype, **given}
    return ftbert.load(source, places[0], **given), ftbert.load(source, places, parallel="pipeline", **given)


def assert_same(got: Any, want: Any, place: Place, what: str = "") -> None:
    assert got.dtype == want.dtype, what
    if not want.is_floating_point():
        assert torch.equal(got, want), what
    else:
        assert got.device == want.device
        assert_close(got, want, atol=limit(place), rtol=limit(place), what=what)


@pytest.mark.parametrize("family", LAYERED)
def test_every_family_and_mask(place: Place, family: str) -> None:
    """Of calls that are not cut the CPU makes the same bits."""
    reference = shared_model(family)
    alone, staged = both(reference, place, 2)
    assert staged.info()["parallel"].startswith("pipeline") and staged.tasks == alone.tasks
    assert staged.config == alone.config
    for mask in masks_of(reference):
        batch = {key: value.to(place.device) for key, value in make_batch(reference, task_of(family), mask).items()}
        want, got = alone(**batch), staged(**batch)
        assert got.keys() == want.keys()
        for name, value in want.items():
            if place.device == "cpu":
                assert torch.equal(got[name], value), name
            assert_same(got[name], value, place, name)
        assert_close(staged(**batch).last_hidden_state, got.last_hidden_state, atol=0, what="run to run")


def ragged(place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enough tokens for several micro-batches: ids, cu_seqlens, types."""
    lengths = [7, 1, 300, 0, 512, 500, 3, 511, 0, 512, 512, 40, 350, 0]
    ids = torch.randint(5, 120, (sum(lengths),))
    types = torch.randint(0, 2, ids.shape)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return ids.to(place.device), cu.to(place.device), types.to(place.device)


def deep_bert() -> Any:
    return make_bert(num_hidden_layers=3, max_position_embeddings=512)


@pytest.mark.parametrize("stages", [2, 3])
def test_packed_micro_batches(place: Place, stages: int) -> None:
    alone, staged = both(deep_bert(), place, stages)
    ids, cu, types = ragged(place)
    of_call = (ids, None, types, cu, 512)
    for got, want, name in zip(
        staged.module.forward_batch(*of_call, WANTS), alone.module.forward_batch(*of_call, WANTS), WANTS, strict=True
    ):
        assert_same(got, want, place, name)
    rows = torch.tensor([0, 2000, 8, 3000]).to(place.device)
    got, want = (one.forward_packed(ids, cu, 512, types, want="rows", rows=rows) for one in (staged, alone))
    assert_same(got, want, place, "rows")


@pytest.mark.parametrize("where", ["none", "there", "host"])
def test_padded_micro_batches(place: Place, where: str) -> None:
    """Masks with holes and a text without tokens; the mask is on the model's device or the CPU."""
    alone, staged = both(deep_bert(), place, 3)
    ids = torch.randint(5, 120, (12, 400)).to(place.device)
    mask = (torch.rand(12, 400) < torch.linspace(0, 1, 12)[:, None]).long()
    given = None if where == "none" else mask.to(place.device) if where == "there" else mask
    wants = [*WANTS, "packed_index", "packed_index"]
    of_call = (ids, given, None, None, 0)
    for _recorded in range(3):
        for got, want, name in zip(
            staged.module.forward_batch(*of_call, wants), alone.module.forward_batch(*of_call, wants), wants, strict=True
        ):
            assert_same(got, want, place, name)


def test_heads_over_padded_micro_batches(place: Place) -> None:
    reference = shared_model("bert", num_hidden_layers=4, max_position_embeddings=512)
    alone, staged = both(reference, place, 2)
    ids, mask = torch.randint(5, 96, (12, 400)).to(place.device), torch.ones(12, 400, dtype=torch.int64)
    mask[3, 200:] = 0
    assert_same(staged(ids, mask).logits, alone(ids, mask).logits, place)


def test_large_calls_are_cut(place: Place) -> None:
    """Of whole sequences, and not where a micro-batch would have too few tokens."""
    staged = both(deep_bert(), place, 2)[1]
    ids, cu, _ = ragged(place)

    def joined(*call: Any) -> int:
        with torch.profiler.profile() as profile:
            staged.forward_packed(*call)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::cat")

    assert joined(ids, cu, 512) == 1
    assert joined(ids[:820], cu[:6], 512) == 0


def test_wants_alone(place: Place) -> None:
    """Of the last layer some rows are computed then; what no layer makes comes too."""
    alone, staged = both(deep_bert(), place, 2)
    ids, cu, types = ragged(place)
    for want in WANTS[:-1]:
        got, expected = (one.forward_packed(ids, cu, 512, types, want=want) for one in (staged, alone))
        assert_same(got, expected, place, want)
    nothing = ids[:0], cu[:1].repeat(3), 0
    for want in ("tokens", "first", "hidden_states"):
        got, expected = (one.forward_packed(*nothing, want=want) for one in (staged, alone))
        assert_same(got, expected, place, want)


def test_a_shared_prefix(place: Place) -> None:
    alone, staged = both(made("qwen3"), place, 2)
    ids = torch.randint(5, 40, (30,)).to(place.device)
    cu = torch.tensor([0, 10, 15, 30]).int().to(place.device)
    got, want = (one.forward_packed(ids, cu, 25, want="last", shared_prefix=10) for one in (staged, alone))
    assert_same(got, want, place)


def test_hidden_states_of_shared_layers(place: Place) -> None:
    """ALBERT's stages share one set of weights; its layers are three."""
    reference = shared_model("albert", num_hidden_layers=3)
    alone, staged = both(reference, place, 3)
    batch = {key: value.to(place.device) for key, value in make_batch(reference, task_of("albert"), "left").items()}
    got, want = (one(**batch, output_hidden_states=True) for one in (staged, alone))
    for mine, other in zip(got.hidden_states, want.hidden_states, strict=True):
        assert_same(mine, other, place)


@pytest.mark.parametrize("dtype", ["q8_0", pytest.param("bf16", marks=has_bf16)])
def test_other_matrices(place: Place, dtype: str) -> None:
    reference = shared_model("bert", hidden_size=256, intermediate_size=256)
    alone, staged = both(reference, place, 2, dtype=dtype)
    batch = {key: value.to(place.device) for key, value in make_batch(reference, task_of("bert"), "right").items()}
    got, want = staged(**batch).last_hidden_state, alone(**batch).last_hidden_state
    assert (got - want).norm() <= (1e-5 if place.device == "cpu" else 0.02) * want.norm()
    assert {"products", "attention_products"} & staged.info().keys() == {"products", "attention_products"} & alone.info().keys()


def test_threads(place: Place) -> None:
    alone, staged = both(make_bert(), place, 2)
    ids = [torch.randint(5, 120, (3, 20 + 5 * i)) for i in range(4)]
    want = [alone(one.to(place.device)).last_hidden_state for one in ids]
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(8):
                assert_same(staged(ids[i].to(place.device)).last_hidden_state, want[i], place)
        except BaseException as error:  # noqa: BLE001 - shown below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def stages_by_hand(places: list[str], dtype: torch.dtype, source: Any, **second: Any) -> Any:
    """second: what the second stage's config says."""
    checkpoint = open_checkpoint(source)
    whole = checkpoint.config.encoder
    documents = [config.to_json() for config in stages_of(whole, 2)]
    documents[1] |= second
    made = []
    for device, document in zip(places, documents, strict=True):
        config = ModelConfig.from_json(document)
        weights = {name: checkpoint.read(name, dtype).to(device) for name in config.weight_shapes()}
        made.append(torch.classes.ftbert.Encoder(weights, config.text(), "auto"))
    return made, whole.text()


def test_a_stage_that_fails_ends_the_call(place: Place) -> None:
    """One that takes shorter texts than the others; then they go on."""
    made, config = stages_by_hand(places_of(place, 2), place.dtype, make_bert(), positions={"kind": "absolute", "rows": 10})
    encoder = torch.classes.ftbert.Encoder.pipeline_parallel(made, config, [0, 1], {}, *HERE)
    short, long = (torch.randint(5, 120, (2, n), device=place.device) for n in (9, 30))
    before = encoder.forward(short)[0]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="positions for 10"):
            encoder.forward(long)
        assert_close(encoder.forward(short)[0], before, atol=0)


def test_what_is_wrong_with_a_call(place: Place) -> None:
    alone, staged = both(deep_bert(), place, 2)
    ids, cu, _ = ragged(place)
    for call in (
        lambda one: one.forward_packed(ids, cu, 512, want="packed_index"),
        lambda one: one.forward_packed(ids, cu, 512, want="rows"),
        lambda one: one.forward_packed(ids, cu, 513),
        lambda one: one(ids.view(1, -1)),
        lambda one: one(ids[:4000].view(10, -1), torch.full((10, 400), 2)),
        lambda one: one(ids[:4000].view(10, -1), torch.ones(10, 399)),
        *([lambda one: one.forward_packed(ids, cu + 1, 512)] if place.device == "cpu" else []),
    ):
        with pytest.raises(RuntimeError) as expected:
            call(alone)
        with pytest.raises(RuntimeError) as got:
            call(staged)
        assert str(got.value) == str(expected.value)


def test_numbers_of_layers(place: Place) -> None:
    """Split by bytes of weights; ftbert says where they lie."""
    whole = open_checkpoint(make_bert(num_hidden_layers=7)).config.encoder
    assert [config.depth for config in stages_of(whole, 3)] == [2, 3, 2]
    assert [config.stage.first_layer for config in stages_of(whole, 3) if config.stage] == [0, 2, 5]
    names = [name for config in stages_of(whole, 3) for name in config.weight_shapes()]
    assert sorted(names) == sorted(whole.weight_shapes())
    for config in stages_of(whole, 3):
        assert ModelConfig.from_json(config.to_json()) == config
    places = places_of(place, 2)
    told = ftbert.load(make_bert(num_hidden_layers=3), places, place.dtype, parallel="pipeline").info()["parallel"]
    assert told == f"pipeline, layer 0 on {places[0]}, layers 1 to 2 on {places[1]}"


def test_the_command_line(place: Place, tiny_bert: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    folder, places = tiny_bert(tmp_path), places_of(place, 2)
    assert cli.main(["info", str(folder), "--device", ",".join(places), "--parallel", "pipeline", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["model"]["parallel"]
    assert told == f"pipeline, layer 0 on {places[0]}, layer 1 on {places[1]}"


def test_wide_layers_count_for_more() -> None:
    whole = open_checkpoint(make_bert(num_hidden_layers=4)).config.encoder
    wide = replace(whole.layers[0], ffn=replace(whole.layers[0].ffn, inter=4000))
    assert [config.depth for config in stages_of(replace(whole, layers=(wide, *whole.layers[1:])), 2)] == [1, 3]


def test_what_load_refuses() -> None:
    source = make_bert()
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        ftbert.load(source, ["cpu"] * 3, parallel="pipeline")
    with pytest.raises(ValueError, match="init_process_group"):
        ftbert.load(source, "cpu", parallel="pipeline")


def test_stages_are_not_saved_or_moved() -> None:
    staged = ftbert.load(make_bert(), ["cpu", "cpu"], parallel="pipeline")
    for use in (staged.encoder.weights, lambda: staged.to("cpu", "bf16")):
        with pytest.raises(RuntimeError, match="several devices"):
            use()


def test_a_stage_alone_computes_nothing() -> None:
    (first, second), config = stages_by_hand(["cpu", "cpu"], torch.float32, make_bert())
    with pytest.raises(RuntimeError, match='stage 1 of 2.*parallel="pipeline"'):
        second.forward(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="expected stage 0 of 2, got stage 1"):
        torch.classes.ftbert.Encoder.pipeline_parallel([second, first], config, [0, 1], {}, *HERE)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders(place: Place, family: str) -> None:
    alone, staged = both(made(family), place, 2)
    assert_same_decoders(decoder_of(staged, 3, 64), decoder_of(alone, 3, 64), family, place)


@pytest.mark.parametrize("dtype", ["fp32", "q8_0"])
def test_generation(place: Place, dtype: str) -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": True}
    alone, staged = both(make_model("qwen3", "causal_lm", 0, **sizes, **heads), place, 2, dtype=dtype)
    prompts = [[5, 9, 40, 7], [3], [60, 61, 8]]
    got = staged.generate_ids(prompts, max_new_tokens=8)
    assert got == staged.generate_ids(prompts, max_new_tokens=8)
    if place.device == "cpu":
        assert got == alone.generate_ids(prompts, max_new_tokens=8)


def test_a_stage_that_fails_leaves_a_cache_as_it_was() -> None:
    """The second one, of fewer ids, when the first has stored the tokens; a GPU looks at no ids."""
    place, source = Place("cpu", torch.float32), made("qwen3")
    parts, config = stages_by_hand(["cpu", "cpu"], place.dtype, source, vocab=50)
    encoder = torch.classes.ftbert.Encoder.pipeline_parallel(parts, config, [0, 1], {}, *HERE)
    head = ftbert.load(source).head("causal_lm")
    weight = parts[0].weight("embeddings.word") if head.tied else head.out_weight
    decoder = torch.classes.ftbert.Decoder(encoder, weight, None, 2, 32, None)
    ids = torch.randint(5, 50, (9,))
    want = [run(decoder, place, [0], [part])[0] for part in (ids[:6], ids[6:])]
    decoder.truncate(0, 6)
    for wrong in (torch.tensor([60, 7, 8]), torch.tensor([51])):
        with pytest.raises(RuntimeError, match=r"\[0, 50\)"):
            run(decoder, place, [0], [wrong])
        assert decoder.lengths() == [6, 0]
    assert_close(run(decoder, place, [0], [ids[6:]])[0], want[1], atol=0)
