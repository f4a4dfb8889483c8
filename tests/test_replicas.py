"""A model with a replica on each of several devices against the same model on one.

On the CPU two replicas share it, which `load` refuses: it shows all but the copies between GPUs.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import have_gpu, make_bert
from language_models import made
from other_folders import bge_m3, colbert_folder, scored, splade_folder
from stub_model import threads_left
from tokenizers_offline import TEXTS, folder_of, sentence_folder

import ftbert
from ftbert import cli, devices
from ftbert.evaluation import bench
from ftbert.files import embed_file
from ftbert.replicas import replicate

CPU = torch.device("cpu")
DENSE = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
MORE = [*TEXTS, "hello " * 90, *(" ".join(TEXTS[i : i + 3]) for i in range(0, len(TEXTS), 2)), ""] * 3
PAIRS = list(zip(MORE, reversed(MORE), strict=True))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Replicas on a CPU share its threads, and of another number of them numbers may differ by rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert threads_left() == 0


@pytest.fixture(params=["cpu", "cuda"])
def both(request: pytest.FixtureRequest) -> Callable[..., tuple[ftbert.Model, ftbert.Model]]:
    """both(source, ...) -> the model on one device, and on two."""
    if request.param == "cuda" and not (have_gpu() and torch.cuda.device_count() > 1):
        pytest.skip("needs two GPUs")

    def load(source: Any, **given: Any) -> tuple[ftbert.Model, ftbert.Model]:
        if request.param == "cpu":
            return ftbert.load(source, **given), replicate(ftbert.load(source, **given), [CPU])
        return ftbert.load(source, "cuda:0", **given), ftbert.load(source, ["cuda:0", "cuda:1"], **given)

    return load


def assert_same(got: Any, want: Any, model: ftbert.Model) -> None:
    """Bit for bit; on a GPU to rounding, since a recorded call may run other kernels."""
    assert type(got) is type(want)
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for mine, other in zip(got, want, strict=True):
            assert_same(mine, other, model)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        assert_same(list(got.values()), list(want.values()), model)
    elif isinstance(want, np.ndarray | torch.Tensor | float | np.floating):
        mine, other = (np.asarray(one.to_dense().cpu() if isinstance(one, torch.Tensor) else one) for one in (got, want))
        assert mine.shape == other.shape and mine.dtype == other.dtype
        if model.device == CPU:
            assert np.array_equal(mine, other)
        elif mine.dtype == np.float32 or mine.ndim == 0:
            assert np.allclose(mine, other, atol=1e-4, rtol=1e-4)
        else:
            assert (mine != other).mean() < 0.02  # at the edge between two integers
    else:
        assert got == want


ENCODE: list[dict[str, Any]] = [
    {}, {"normalize": False}, {"normalize": None, "pooling": "cls+mean"}, {"pooling": "weightedmean"}, {"long_texts": "mean"}, {"truncate_dim": 5},
    {"prompt_name": "query"}, {"task": "query"}, {"output_value": "token_embeddings"}, {"precision": "ubinary"}, {"precision": "int8"},
    {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"batch_size": 1}, {"max_length": 7}, {"max_tokens": 100_000},
]  # fmt: skip


def test_encode(both: Any, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: "}}
    alone, together = both(sentence_folder(tmp_path / "a", include_prompt=False, normalize=True, **prompts))
    for options in ENCODE:
        given = {"max_tokens": 80, **options}
        assert_same(together.encode(MORE, **given), alone.encode(MORE, **given), alone)
    assert_same(together.encode(text for text in MORE), alone.encode(MORE), alone)
    assert_same(together.encode([]), alone.encode([]), alone)
    assert_same(together.encode("hello"), alone.encode("hello"), alone)


def test_other_vectors(both: Any, tmp_path: Path) -> None:
    """The Dense modules and the linear layers of a folder are on every device."""
    alone, together = both(sentence_folder(tmp_path / "dense", behind=[DENSE]))
    assert_same(together.encode(MORE, max_tokens=80), alone.encode(MORE, max_tokens=80), alone)
    alone, together = both(bge_m3(tmp_path / "m3")[0])
    for name in ("encode_sparse", "encode_multi_vector", "encode"):
        got, want = (getattr(model, name)(MORE, max_tokens=80) for model in (together, alone))
        assert_same(got, want, alone)
    alone, together = both(splade_folder(tmp_path / "splade"), heads=False)
    assert_same(together.encode_sparse(MORE, max_tokens=80), alone.encode_sparse(MORE, max_tokens=80), alone)
    alone, together = both(colbert_folder(tmp_path / "colbert"), heads=False)
    assert_same(together.encode_multi_vector(MORE, max_tokens=80), alone.encode_multi_vector(MORE, max_tokens=80), alone)


def test_scores(both: Any, tmp_path: Path) -> None:
    alone, together = both(folder_of(tmp_path / "one"))
    assert_same(together.predict(PAIRS, max_tokens=90), alone.predict(PAIRS, max_tokens=90), alone)
    assert_same(together.predict(("a", "b")), alone.predict(("a", "b")), alone)
    different, given = list(dict.fromkeys(MORE)), {"top_k": 9, "return_documents": True, "max_tokens": 90}
    assert_same(together.rerank("hello", different, **given), alone.rerank("hello", different, **given), alone)
    with pytest.raises(ValueError, match=f"^({together.device}|{together.devices[1]}): activation_fn must keep the shape"):
        together.predict(PAIRS, activation_fn=lambda logits: logits[:1])
    alone, together = both(folder_of(tmp_path / "tokens", task="token_classification", labels=3))
    assert_same(together.predict(MORE, max_tokens=90), alone.predict(MORE, max_tokens=90), alone)
    assert_same(together.token_classify(MORE[:9]), alone.token_classify(MORE[:9]), alone)
    alone, together = both(scored(tmp_path / "next"))
    assert_same(together.predict(PAIRS[:20], max_tokens=150), alone.predict(PAIRS[:20], max_tokens=150), alone)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "q8_0", "fp8"])
def test_dtypes(both: Any, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    folder = sentence_folder(tmp_path / "a")
    try:
        alone, together = both(folder, dtype=dtype)
    except ValueError as error:
        pytest.skip(str(error))
    assert together.dtype == together.replicas[1].dtype == alone.dtype
    got, want = (model.encode(MORE, max_tokens=80) for model in (together, alone))
    assert np.array_equal(got, want) if alone.device == CPU else (got * want).sum(1).min() > 0.999


def test_files(both: Any, tmp_path: Path) -> None:
    alone, together = both(sentence_folder(tmp_path / "a"))
    (tmp_path / "in.txt").write_text("\n".join(text.replace("\n", " ").replace("\r", " ") for text in MORE))
    for model, name in ((alone, "one.npy"), (together, "two.npy")):
        embed_file(model, tmp_path / "in.txt", tmp_path / name, batch_records=7, max_tokens=80)
    assert_same(np.load(tmp_path / "two.npy"), np.load(tmp_path / "one.npy"), alone)


def test_an_error_on_the_second_device(both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = both(sentence_folder(tmp_path / "a"))
    second, asked = together.replicas[1], threading.Event()
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> Any:
            asked.set()
            raise torch.OutOfMemoryError("no memory is left")

        def wait(*given: Any, **more: Any) -> Any:
            asked.wait(30)
            return type(together).forward_packed(together, *given, **more)

        broken.setattr(second, "forward_packed", fail)
        broken.setattr(together, "forward_packed", wait)
        with pytest.raises(torch.OutOfMemoryError, match=f"^{second.device}: no memory is left$"):
            together.encode(MORE, max_tokens=80)
        assert threads_left() == 0
    assert_same(together.encode(MORE, max_tokens=80), alone.encode(MORE, max_tokens=80), alone)


def test_small_calls_go_to_one_after_the_other(both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, together = both(sentence_folder(tmp_path / "a"))
    asked: list[int] = []
    for place, replica in enumerate(together.replicas):
        def counted(*given: Any, place: int = place, forward: Any = replica.forward_packed, **more: Any) -> Any:
            asked.append(place)
            return forward(*given, **more)

        monkeypatch.setattr(replica, "forward_packed", counted)
    for _ in range(4):
        together.encode("hello")
    assert asked == [0, 1, 0, 1]


def test_direct_calls(both: Any) -> None:
    """They run where the ids are."""
    alone, together = both(make_bert())
    ids = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    for replica in together.replicas:
        there = ids.to(replica.device)
        got = together(there, there > 20)
        assert got.last_hidden_state.device == replica.device
        assert_same(got.last_hidden_state, alone(ids.to(alone.device), (ids > 20).to(alone.device)).last_hidden_state, alone)
        cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=replica.device)
        assert together.forward_packed(there[0], cu, 5).device == replica.device
    if alone.device != CPU:
        with pytest.raises(RuntimeError, match="input_ids: the model is on cuda:0, got Long .* on cpu"):
            together(ids)


def test_each_call_of_tensors_knows_the_replicas() -> None:
    """Also by name. A fake one shows where calls go."""
    model, other = ftbert.load(make_bert()), SimpleNamespace(device=torch.device("cuda", 1), calls=[])
    forward, masked = (lambda *_, name=name, **__: other.calls.append(name) for name in ("forward", "masked"))
    other.module = SimpleNamespace(forward_packed=forward, logits_at=masked)
    model._others = (other,)
    ids: Any = SimpleNamespace(device=other.device)
    model.forward_packed(ids, ids, 3)
    model.forward_packed(input_ids=ids, cu_seqlens=ids, max_seqlen=3)
    with pytest.raises(ValueError, match="this model has no head"):
        model.logits_packed(ids, ids, 3)
    assert other.calls == ["forward", "forward"]
    assert model.replica_at(CPU) is model.replica_at(torch.device("cuda", 2)) is model
    assert model.devices == (CPU, other.device) and "on cpu, cuda:1" in repr(model)


def test_generate_is_the_first_replicas(both: Any) -> None:
    alone, together = both(made("llama"))
    prompts = [[5, 6, 7], [8, 9]]
    assert together.generate_ids(prompts, max_new_tokens=5) == alone.generate_ids(prompts, max_new_tokens=5)


def test_copies(both: Any, tmp_path: Path) -> None:
    """pickle, deepcopy and to keep the devices; a module that is saved is one replica's."""
    alone, together = both(sentence_folder(tmp_path / "a"))
    want = alone.encode(MORE, max_tokens=80)
    stored = pickle.dumps(together)
    assert len(stored) < 1.1 * len(pickle.dumps(alone)), "the weights once"
    for other in (pickle.loads(stored), copy.deepcopy(together), together.to()):
        assert other.devices == together.devices and other.replicas[1] is not together.replicas[1]
        assert_same(other.encode(MORE, max_tokens=80), want, alone)
    assert together.to(together.device).devices == (together.device,)
    together.use_cuda_graphs(False)
    ids = torch.tensor([[5, 6, 7]], device=alone.device)
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(together.module), saved)
    saved.seek(0)
    assert_same(torch.jit.load(saved)(ids)[0], alone(ids).last_hidden_state, alone)


def test_bench(both: Any) -> None:
    _, together = both(make_bert())
    result = bench(together, batch=3, longest=16, rounds=1)
    assert result.device == ", ".join(map(str, together.devices))
    for batch in result.batches:
        assert [one.name for one in batch.timings][2:] == ["ftbert", "ftbert, 2 replicas, per batch"]
        assert batch.timings[3].max_abs_diff == pytest.approx(batch.timings[2].max_abs_diff, abs=1e-5)


def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts have as many tokens as asked for, and their vectors differ, so that a wrong order would show."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    bench_replicas = importlib.import_module("bench_replicas")
    bench_replicas.make_folder(tmp_path / "model", bench_replicas.SMALL)
    vectors = ftbert.load(tmp_path / "model").encode(texts := bench_replicas.make_texts(9, 50))
    assert np.triu(vectors @ vectors.T, 1).max() < 0.995 and all(len(text.split()) == 48 for text in texts)
    out = tmp_path / "out.json"
    assert bench_replicas.main(["--quick", "--texts", "40", "--tokens", "50", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["tokens"] == 40 * 50 and [row["name"] for row in document["rows"]][:2] == ["one", "all 2"]
    assert sum(document["batches"].values()) > 0 and document["least_cosine"] > 0.999


# ---- lists of devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as devices go: nothing can be computed there."""
    monkeypatch.setattr(devices, "build_info", lambda: {"cuda": "yes"})
    for name, value in {"is_available": True, "device_count": 3, "current_device": 0, "_is_in_bad_fork": False}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


def test_lists_of_devices(three_gpus: None) -> None:
    gpus = tuple(torch.device("cuda", index) for index in range(3))
    for given, want in {"cuda:*": gpus, "cuda": gpus[:1], ("cuda:2", gpus[0]): (gpus[2], gpus[0]), ("cuda:1",): gpus[1:2]}.items():
        assert devices.check_devices(given) == devices.check_devices(list(given) if isinstance(given, tuple) else given) == want
    assert devices.check_devices(["cpu"]) == (CPU,)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], ValueError, "expected at least one device, got an empty list"),
        (["cuda:0", "cuda:0"], ValueError, "each GPU holds one replica; got cuda:0, cuda:0"),
        (["cuda", torch.device("cuda", 0)], ValueError, "each GPU holds one replica; got cuda:0, cuda:0"),
        (["cpu", "cpu"], ValueError, "several devices are GPUs, .* got cpu, cpu"),
        (["cuda:1", "cpu"], ValueError, "several devices are GPUs, .* got cuda:1, cpu"),
        (["cuda:0", "cuda:3"], RuntimeError, "device='cuda:3': there are 3 GPUs"),
        (["cuda:0", "tpu"], ValueError, "expected cpu, cuda or cuda:N, got 'tpu'; several GPUs are a list"),
        (["cuda:0", "mps"], ValueError, "expected cpu or cuda, got mps"),
        (["cuda:0", None], ValueError, "expected cpu, cuda or cuda:N, got None"),
        (["cuda:*"], ValueError, "expected cpu, cuda or cuda:N, got 'cuda:\\*'"),
        ("cuda:0,cuda:1", ValueError, "expected cpu, cuda or cuda:N, got 'cuda:0,cuda:1'; several GPUs are a list, or 'cuda:\\*' for all"),
        ({"cuda:0"}, ValueError, "expected cpu, cuda or cuda:N, got {'cuda:0'}"),
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_lists_are_named(three_gpus: None, given: Any, error: type[Exception], words: str) -> None:
    model = ftbert.load(make_bert())
    for call in (lambda: ftbert.load(make_bert(), given), lambda: model.to(given)):
        with pytest.raises(error, match=f"^(device: )?{words}"):
            call()


def test_unequal_gpus_are_told(three_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA A", 1: "NVIDIA A", 2: "NVIDIA B"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr("ftbert.tuning.gemm_table.summary", lambda device: f"table of {names[device.index]}")

    def told(*places: int) -> dict[str, str]:
        models: list[Any] = [SimpleNamespace(device=torch.device("cuda", place)) for place in places]

        class Fake(ftbert.replicas.Replicated):
            device, _others = models[0].device, tuple(models[1:])

        return Fake().told_replicas()

    assert told(0) == {"gemm_table": "table of NVIDIA A"}
    assert told(0, 1) == {"replicas": "cuda:0 (NVIDIA A), cuda:1 (NVIDIA A)", "gemm_table": "table of NVIDIA A"}
    unequal = told(0, 2)
    assert unequal["replicas"].startswith("cuda:0 (NVIDIA A), cuda:2 (NVIDIA B); unequal: each batch goes to whichever")
    assert unequal["gemm_table"] == "cuda:0: table of NVIDIA A; cuda:2: table of NVIDIA B"


@pytest.mark.parametrize(("given", "want"), [("cuda:0,cuda:1", ["cuda:0", "cuda:1"]), ("cuda:*", "cuda:*"), ("cuda:1", "cuda:1")])
def test_the_command_line_hands_lists_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, want: Any) -> None:
    seen: list[Any] = []

    def load(_: Any, **options: Any) -> Any:
        seen.append(options["device"])
        raise ValueError("enough")

    monkeypatch.setattr(ftbert, "load", load)
    (tmp_path / "in.txt").write_text("a\n")
    folder = str(folder_of(tmp_path / "model"))
    for arguments in (["embed", folder, str(tmp_path / "in.txt"), str(tmp_path / "out.npy")], ["bench", folder], ["info", folder]):
        assert cli.main([*arguments, "--device", given]) == 1
    assert seen == [want] * 3
