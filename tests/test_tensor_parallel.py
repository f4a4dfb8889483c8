"""A model whose heads and inner columns several ranks share against the same model on one device.

Here the ranks are in one process: GPUs, or on the CPU threads. Those of several processes: test_process_ranks.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, make_bert
from families import make_batch, masks_of
from language_models import FAMILIES as DECODERS
from language_models import assert_same_decoders, made, texts
from own_kernels import multiplies
from ranks import FAMILIES, places_of, shared_model, task_of

import ftbert
from ftbert._library import build_info
from ftbert.checkpoint import ModelConfig, cut, shard_of
from ftbert.converters import convert, open_checkpoint
from ftbert.decoding.decoder import decoder_of
from ftbert.quantization import quantize


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def limit(place: Place) -> float:
    return 2e-5 if place.dtype == torch.float32 else 64 * place.eps


def both(source: Any, place: Place, ranks: int, **given: Any) -> tuple[ftbert.Model, ftbert.Model]:
    places = places_of(place, ranks)
    given = {"dtype": place.dtype, **given}
    return ftbert.load(source, places[0], **given), ftbert.load(source, places, parallel="tensor", **given)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_mask(place: Place, family: str, ranks: int) -> None:
    reference = shared_model(family)
    alone, shared = both(reference, place, ranks)
    told = shared.info()
    assert told["parallel"].startswith("tensor") and shared.tasks == alone.tasks
    assert re.fullmatch(r"\d+\.\d us for 128 rows of \d+, with residual and norm", told["sum_over_ranks"])
    assert "sum_over_ranks" not in alone.info()
    for mask in masks_of(reference):
        batch = {key: value.to(place.device) for key, value in make_batch(reference, task_of(family), mask).items()}
        want, got = alone(**batch), shared(**batch)
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert_close(got[name], value, atol=limit(place), rtol=limit(place), what=name)
        assert_close(shared(**batch).last_hidden_state, got.last_hidden_state, atol=0, what="run to run")


def test_gpus_that_do_not_read_each_others_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.device == "cpu":
        pytest.skip("ranks of the CPU share its memory")
    monkeypatch.setenv("FTBERT_PEER_MEMORY", "off")
    alone, shared = both(make_bert(), place, 2)
    assert "by NCCL" in shared.info()["parallel"]
    ids = torch.randint(5, 120, (3, 40), device=place.device)
    want, got = alone(ids).last_hidden_state, shared(ids).last_hidden_state
    assert_close(got, want, atol=limit(place), rtol=limit(place))
    assert_close(shared(ids).last_hidden_state, got, atol=0, what="run to run")
    with pytest.raises(RuntimeError, match="token"):
        shared(torch.ones(1, 1000, dtype=torch.int64, device=place.device))
    assert_close(shared(ids).last_hidden_state, got, atol=0, what="after an error")


@pytest.mark.parametrize("want", ["first", "last", "pooled", "hidden_states", "tokens"])
def test_packed_calls(place: Place, want: str) -> None:
    reference = make_bert(hidden_size=128, num_attention_heads=4, num_hidden_layers=3)
    alone, shared = both(reference, place, 2)
    lengths = [7, 1, 40, 0, 128, 3]
    ids = torch.randint(5, 120, (sum(lengths),)).to(place.device)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(place.device)
    keys = torch.tensor([5, 1, 40, 0, 100, 1], dtype=torch.int32, device=place.device)
    for given in (None, None, None, keys):  # recorded by the second
        got, wanted = (one.forward_packed(ids, cu, 128, want=want, keys=given) for one in (shared, alone))
        assert_close(got, wanted, atol=limit(place), rtol=limit(place))


def test_rows_that_no_vector_fills(place: Place) -> None:
    """Those a kernel of their own adds up, before the norm."""
    reference = make_bert(hidden_size=50, num_attention_heads=2, intermediate_size=70, num_hidden_layers=3)
    alone, shared = both(reference, place, 2)
    ids = torch.randint(5, 120, (3, 40), device=place.device)
    for _recorded in range(3):
        want, got = alone(ids).last_hidden_state, shared(ids).last_hidden_state
        assert_close(got, want, atol=limit(place), rtol=limit(place))


def test_sums_that_are_sent_and_sums_that_are_read(place: Place) -> None:
    """Two GPUs send parts of up to 32 MiB, and read larger ones where they are: both, and from one to the other."""
    reference = make_bert(hidden_size=256, num_attention_heads=4)
    alone, shared = both(reference, place, 2)
    most = 300 if place.device == "cpu" else 2**25 // (256 * torch.finfo(place.dtype).bits // 8)
    for rows in (3, most // 2, most + 500, 5, most + 500, most + 400, most // 2, 3):
        ids = torch.randint(5, 120, (rows,), device=place.device)
        cu = torch.tensor([*range(0, rows, 100), rows], dtype=torch.int32, device=place.device)
        want, got = (one.forward_packed(ids, cu, 100, want="tokens") for one in (alone, shared))
        assert_close(got, want, atol=limit(place), rtol=limit(place), what=f"{rows} rows")


@pytest.mark.parametrize("hidden", [2048, 4096, 8192])
def test_wide_rows(device: str, hidden: int) -> None:
    """Of each shape of the kernel that adds up, to the widest: 16 KiB."""
    if device == "cpu":
        pytest.skip("rows of the CPU are added up by one loop")
    sizes = {"hidden_size": hidden, "num_attention_heads": hidden // 64, "num_hidden_layers": 1}
    reference, ids = make_bert(**sizes), torch.randint(5, 120, (2, 20), device=device)
    for dtype in (torch.float16, torch.float32):
        place = Place(device, dtype)
        alone, shared = both(reference, place, 2)
        want, got = (model(ids).last_hidden_state for model in (alone, shared))
        assert_close(got, want, atol=limit(place), rtol=limit(place))


def test_what_is_no_number_reaches_its_text_alone(place: Place, tmp_path: Path) -> None:
    """Words that say that nothing has come yet are NaN as well, of bits that no product makes."""
    reference = make_bert()
    with torch.no_grad():
        reference.embeddings.word_embeddings.weight[7] = float("nan")
    reference.save_pretrained(tmp_path / "a")
    _, shared = both(tmp_path / "a", place, 2)
    ids = torch.full((3, 10), 8, device=place.device)
    ids[1, 4] = 7
    numbers = shared(ids).last_hidden_state.isnan().flatten(1)
    assert not numbers[[0, 2]].any() and numbers[1].all()


def assert_near(got: Any, want: Any) -> None:
    """Rows of half as many columns have scales of their own."""
    assert (got.last_hidden_state - want.last_hidden_state).norm() <= 0.03 * want.last_hidden_state.norm()


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_q8_0(place: Place, family: str) -> None:
    heads = {"head_dim": 64} if family == "qwen3" else {}
    reference = shared_model(family, hidden_size=256, intermediate_size=256, **heads)
    alone, shared = both(reference, place, 2, dtype="q8_0")
    batch = {key: value.to(place.device) for key, value in make_batch(reference, task_of(family), "right").items()}
    assert_near(shared(**batch), alone(**batch))


@pytest.mark.parametrize("word", ["int8", "fp8"])
def test_calibrated_folders(device: str, word: str, tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    of_cpu = word == "int8" and build_info()["cpu_int8"] != "none"
    if not (of_cpu if device == "cpu" else multiplies("e4m3" if word == "fp8" else word)):
        pytest.skip(f"nothing here computes in {word}")
    quantize(tiny_bert(tmp_path), tmp_path / word, dtype=word, device=device, any_loss=True)
    place = Place(device, torch.float32)
    alone, shared = both(tmp_path / word, place, 2, dtype=word)
    ids = torch.randint(5, 80, (3, 40), device=device)
    assert_near(shared(ids), alone(ids))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders(place: Place, family: str) -> None:
    alone, shared = both(made(family), place, 2)
    assert_same_decoders(decoder_of(shared, 3, 64), decoder_of(alone, 3, 64), family, place)


def test_generation(place: Place) -> None:
    alone, shared = both(made("qwen3"), place, 2)
    prompts = [one.tolist() for one in texts("qwen3")]
    if place.dtype == torch.float32:
        assert shared.generate_ids(prompts, max_new_tokens=12) == alone.generate_ids(prompts, max_new_tokens=12)
    assert shared.generate_ids(prompts, max_new_tokens=12) == shared.generate_ids(prompts, max_new_tokens=12)


def test_threads_and_models_take_turns(place: Place) -> None:
    (alone, first), (other, second) = (both(make_bert(seed), place, 2) for seed in range(2))
    ids = [torch.randint(5, 120, (3, 20 + 5 * i)) for i in range(4)]
    pairs = [(alone, first), (other, second)] * 2
    want = [one(of.to(place.device)).last_hidden_state for (one, _), of in zip(pairs, ids, strict=True)]
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(8):
                got = pairs[i][1](ids[i].to(place.device)).last_hidden_state
                assert_close(got, want[i], atol=limit(place), rtol=limit(place))
        except BaseException as error:  # noqa: BLE001 - shown below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_call(place: Place, failing: int) -> None:
    """One that takes shorter texts than the others; then the ranks go on."""
    places = places_of(place, 2)
    checkpoint = open_checkpoint(make_bert())
    whole = checkpoint.config.encoder
    configs = [shard_of(whole, rank, 2).to_json() for rank in range(2)]
    configs[failing]["positions"]["rows"] = 10
    shards = []
    for device, document in zip(places, configs, strict=True):
        config = ModelConfig.from_json(document)
        shapes = config.weight_shapes()
        weights = {}
        for name, shape in shapes.items():
            tensor = checkpoint.read(name, place.dtype)
            tensor = tensor[: shape[0]] if name == "embeddings.position" else cut(name, tensor, whole, shapes, config)
            weights[name] = tensor.to(device)
        shards.append(torch.classes.ftbert.Encoder(weights, config.text(), "auto"))
    encoder = torch.classes.ftbert.Encoder.tensor_parallel(shards)
    short, long = (torch.randint(5, 120, (2, n), device=place.device) for n in (9, 30))
    before = encoder.forward(short)[0]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="10") as caught:
            encoder.forward(long)
        assert ("rank 1, on" in str(caught.value)) == (failing == 1)
        assert_close(encoder.forward(short)[0], before, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 2}, "2 heads do not divide among 4 ranks"),
        ({"intermediate_size": 90}, "90 inner columns"),
        ({"hidden_size": 128, "intermediate_size": 256}, "shared by 4 ranks: 128 rows and 32 columns are not multiples"),
    ],
)
def test_numbers_that_do_not_divide(change: dict[str, int], words: str) -> None:
    source = make_bert(**{"num_attention_heads": 4, **change})
    dtype = "q8_0" if "hidden_size" in change else "fp32"
    with pytest.raises(ValueError, match=words):
        ftbert.load(source, ["cpu"] * 4, dtype, parallel="tensor")


def test_a_folder_holds_no_share(tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    convert(tiny_bert(tmp_path), tmp_path / "ours")
    file = tmp_path / "ours" / "config.json"
    document = json.loads(file.read_text())
    stage = {"index": 0, "count": 2, "first_layer": 0, "layers": 4}
    for key, value in (("shard", {"rank": 0, "size": 1}), ("stage", stage)):
        file.write_text(json.dumps(document | {"encoder": document["encoder"] | {key: value}}))
        with pytest.raises(ValueError, match="which a folder holds whole"):
            ftbert.load(tmp_path / "ours")


def test_a_forked_process_has_no_ranks() -> None:
    shared = [ftbert.load(make_bert(), ["cpu", "cpu"], parallel="tensor")]
    shared[0](torch.ones(1, 5, dtype=torch.int64))
    child = os.fork()
    if child == 0:
        try:
            shared[0](torch.ones(1, 5, dtype=torch.int64))
        except RuntimeError as error:
            shared.clear()
            os._exit(7 if "was forked" in str(error) else 1)
        os._exit(2)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
    assert ended and os.waitstatus_to_exitcode(status) == 7


def test_what_load_refuses() -> None:
    source = make_bert()
    with pytest.raises(ValueError, match="init_process_group"):
        ftbert.load(source, "cpu", parallel="tensor")
    with pytest.raises(ValueError, match="'tensor'"):
        ftbert.load(source, ["cpu", "cpu"], parallel="both")
    with pytest.raises(ValueError, match="several devices are GPUs"):
        ftbert.load(source, ["cpu", "cpu"])


def test_shards_are_not_saved_or_moved(tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    shared = ftbert.load(tiny_bert(tmp_path), ["cpu", "cpu"], parallel="tensor")
    for use in (
        shared.encoder.weights,
        lambda: shared.to(dtype="q8_0"),
        lambda: shared.to("cpu", "bf16"),
        lambda: torch.jit.script(shared.module).save(str(tmp_path / "m.pt")),
    ):
        with pytest.raises(RuntimeError, match="several devices"):
            use()


def test_a_shard_alone_computes_nothing() -> None:
    checkpoint = open_checkpoint(make_bert())
    whole = checkpoint.config.encoder
    config = shard_of(whole, 1, 2)
    shapes = config.weight_shapes()
    weights = {name: cut(name, checkpoint.read(name, torch.float32), whole, shapes, config) for name in shapes}
    encoder = torch.classes.ftbert.Encoder(weights, config.text(), "auto")
    assert json.loads(encoder.config())["shard"] == {"rank": 1, "size": 2}
    with pytest.raises(RuntimeError, match='rank 1\'s of 2.*parallel="tensor"'):
        encoder.forward(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="expected rank 0's shard"):
        torch.classes.ftbert.Encoder.tensor_parallel([encoder, encoder])
