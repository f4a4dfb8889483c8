"""Fixtures: where a test runs (device, dtype), real and random models."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from op_library import load_test_ops

from ftbert._library import build_info

# Of several GPUs each of pytest-xdist's workers, "gw0" and on, has another one first. Before CUDA starts in this process,
# which device_count() leaves alone where it can ask the driver's NVML.
if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and (_count := torch.cuda.device_count()) > 1:
    _gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_count)))).split(",")
    _first = int(_worker.removeprefix("gw")) % _count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus[_first:] + _gpus[:_first])

load_test_ops()  # before modules ask for their names

# Asked of the library where a test begins: build_info() starts CUDA, and processes are forked from one that has imported
# this module (test_process_ranks.py).
has_int8 = pytest.mark.cpu_int8
has_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no instructions for bf16"
)

torch.backends.cudnn.allow_tf32 = False  # references convolve in float32, as they multiply: torch's default rounds these alone

VOCAB_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[chr(c) for c in range(97, 123)]]
VOCAB_WORDS += ["##" + chr(c) for c in range(97, 123)] + [f"word{i}" for i in range(40)] + list("0123456789.,!?")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_int8: for CPUs that multiply int8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cpu_int8") and build_info()["cpu_int8"] == "none":
        pytest.skip("this CPU has no instructions for int8")


def first_of(module: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Of each row's first kept token: the last hidden state, and the pooled output."""
    return module.forward_batch(ids, mask, None, None, 0, ["first", "pooled"])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Place:
    """Where a test computes, and the unit of its tolerances."""

    device: str
    dtype: torch.dtype

    @property
    def eps(self) -> float:
        return torch.finfo(self.dtype).eps

    @property
    def missing(self) -> str:
        """Why nothing is computed here on this machine, or ""."""
        if self.device == "cpu":
            return ""
        if not have_gpu():
            return "no GPU"
        from ftbert.gpus import Gpu

        no_bf16 = self.dtype == torch.bfloat16 and Gpu.of("cuda").capability < 80
        return "this GPU has no products in bf16" if no_bf16 else ""

    def __str__(self) -> str:
        return f"{self.device}-{str(self.dtype).removeprefix('torch.')}"


PLACES = [Place("cpu", torch.float32)] + [
    Place("cuda", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
]
DEVICES = ["cpu", "cuda"]
# A machine with a GPU need not repeat what every other machine shows.
if os.environ.get("FTBERT_TEST_DEVICE") == "cuda":
    PLACES, DEVICES = PLACES[1:], DEVICES[1:]
elif torch.cuda.device_count() == 0:
    PLACES = [PLACES[0], Place("cuda", torch.float16)]  # one "no GPU" says as much as one for each dtype


def have_gpu() -> bool:
    if not torch.cuda.is_available():
        return False
    return build_info()["cuda"] == "yes"


def places_here() -> list[Place]:
    """Those of this machine, of which hypothesis draws one; without any, all, which says what is missing."""
    return [place for place in PLACES if not place.missing] or PLACES


@contextmanager
def gpu_memory_left(size: int) -> Iterator[None]:
    """torch gives this process `size` more bytes of GPU memory at most. None is taken: other tests may run there."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + size) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process gets more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    if why := request.param.missing:
        if why == "no GPU" and os.environ.get("FTBERT_TEST_DEVICE") == "cuda":
            pytest.fail("FTBERT_TEST_DEVICE=cuda, but there is no GPU or no CUDA in this build")
        pytest.skip(why)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """For what has no dtype of its own."""
    if request.param == "cuda" and not have_gpu():
        pytest.skip("no GPU")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    folder = os.environ.get("FTBERT_TEST_MINILM")
    if not folder or not Path(folder, "config.json").exists():
        pytest.skip("FTBERT_TEST_MINILM does not name the real MiniLM-L6 folder (make test fetches it)")
    return Path(folder)


@pytest.fixture(scope="session")
def real_onnx() -> Path:
    path = os.environ.get("FTBERT_TEST_ONNX")
    if not path or not Path(path).is_file():
        pytest.skip("FTBERT_TEST_ONNX does not name the real paraphrase-MiniLM-L3-v2.onnx")
    return Path(path)


@pytest.fixture(scope="session")
def stsb_test() -> Path:
    path = os.environ.get("FTBERT_TEST_STSB")
    if not path or not Path(path).exists():
        pytest.skip("FTBERT_TEST_STSB does not name sts-test.csv (make test fetches it)")
    return Path(path)


def randomise(model: torch.nn.Module, seed: int = 0) -> Any:
    """Weights, biases and LayerNorms away from 0 and 1, so that nothing cancels and nothing hides."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        norms = {
            id(part.weight)
            for part in model.modules()
            if type(part).__name__.endswith(("LayerNorm", "RMSNorm")) and part.weight.any()  # else 1 is added
        }
        for name, parameter in model.named_parameters():
            if name.endswith("embed_positions.weight"):
                continue  # made from the config, and frozen
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in norms:
                parameter.copy_(1 + 0.2 * noise)
            else:
                # Activations of order 1 whatever the width, as in a trained model.
                fan = parameter.shape[-1] if parameter.dim() == 2 and "embeddings" not in name else 1
                parameter.copy_(noise * (1.0 / fan**0.5 if fan > 1 else 0.1))
    return model.eval()


def make_bert(seed: int = 0, **overrides: Any) -> Any:
    """A random transformers BertModel; small unless told otherwise."""
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {
        "vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 128,
    }  # fmt: skip
    return randomise(BertModel(BertConfig(**{**sizes, **overrides})), seed)


@pytest.fixture(scope="session")
def tiny_bert() -> Callable[..., Path]:
    """tiny_bert(folder, **config) -> a random HuggingFace BERT folder with a tokenizer."""

    def make(folder: Path, **overrides: Any) -> Path:
        from transformers import BertTokenizerFast

        target = folder / "tiny-bert"
        make_bert(**{"vocab_size": len(VOCAB_WORDS), **overrides}).save_pretrained(target)
        (target / "vocab.txt").write_text("\n".join(VOCAB_WORDS) + "\n", encoding="utf-8")
        BertTokenizerFast(str(target / "vocab.txt")).save_pretrained(target)
        return target

    return make


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A StubModel with a tokenizer's folder."""
    from stub_model import StubModel, pooling, write_tokenizer

    monkeypatch.setattr(torch.ops.ftbert, "pooling", pooling, raising=False)
    return StubModel(write_tokenizer(tmp_path / "model"))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's table of tables.HERE belongs; nothing is there, and no other table exists."""
    from tables import HERE

    from ftbert.tuning import gemm_table

    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FTBERT_GEMM_TABLE", raising=False)
    monkeypatch.setattr(gemm_table, "_SHIPPED", tmp_path / "shipped")
    path = gemm_table.user_table(HERE)
    assert path is not None
    return path
