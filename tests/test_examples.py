"""The model outside eager Python: TorchScript in another process and in C++, torch.compile, torch.export, AOTInductor."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import have_gpu, make_bert
from families import make_model

import ftbert

ROOT = Path(__file__).resolve().parent.parent
IDS = torch.tensor([[11, 12, 13, 14, 15, 0, 0], [21, 22, 23, 24, 25, 26, 27]])
MASK = (IDS != 0).long()

@pytest.fixture(scope="module")
def model() -> ftbert.Model:
    return ftbert.load(make_bert())


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    yield
    torch._dynamo.reset()


READ_IN_NEW_PROCESS = """
import sys, torch
what, file, out, library = sys.argv[1:]
ids = torch.tensor([[11, 12, 13, 14, 15, 0, 0], [21, 22, 23, 24, 25, 26, 27]])
if what == "script, library alone":
    torch.ops.load_library(library)
    model = torch.jit.load(file)
else:
    import pickle, ftbert
    if what == "pickle":
        model = pickle.load(open(file, "rb")).module
    elif what == "torch.save":
        model = torch.load(file, weights_only=False)
    else:
        ftbert.load_library()
        model = torch.jit.load(file) if what == "script" else torch.export.load(file).module()
torch.save(tuple(model(ids, (ids != 0).long())), out)
"""


@pytest.mark.parametrize("what", ["pickle", "torch.save", "script", "script, library alone", "export"])
def test_saved_models_are_read_in_a_new_process(model: ftbert.Model, tmp_path: Path, what: str) -> None:
    file, out = tmp_path / "m.pt2", tmp_path / "out.pt"
    if what == "pickle":
        file.write_bytes(pickle.dumps(model))
    elif what == "torch.save":
        torch.save(model.module, file)
    elif what.startswith("script"):
        torch.jit.script(model.module).save(str(file))
    else:
        torch.export.save(torch.export.export(model.module, (IDS, MASK)), file)
    command = [sys.executable, "-c", READ_IN_NEW_PROCESS, what, str(file), str(out), str(ftbert.library_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    want = model(IDS, MASK)
    for got, expected in zip(torch.load(out), (want.last_hidden_state, want.pooler_output), strict=True):
        assert torch.equal(got, expected)


def in_folder(name: str, module: str) -> Any:
    """A module beside an example's C++ program."""
    sys.path.insert(0, str(ROOT / "examples" / name))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop(0)


def test_scripted_module_in_cpp(model: ftbert.Model, tmp_path: Path) -> None:
    assert in_folder("torchscript_cpp", "save_and_compare").compare(model, tmp_path / "build") == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not have_gpu(), reason="no GPU"))])
def test_package_of_aotinductor_in_cpp(device: str, tmp_path: Path) -> None:
    """Two batches of other sizes and lengths; an error of the binding; no Python behind the program."""
    difference = in_folder("aoti_cpp", "package_and_compare").compare(ftbert.load(make_bert(), device=device), tmp_path)
    assert difference <= (0 if device == "cpu" else 1e-6)
    program, library = tmp_path / "run_package", ftbert.library_path()
    command = [program, library, tmp_path / "model.pt2"]
    done = subprocess.run(command, input="7 " * 1000, capture_output=True, text=True, check=False, env={})
    assert done.returncode == 1 and "sequence of 1000 tokens: the model has positions for" in done.stderr
    linked = subprocess.run(["ldd", program, library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in linked and "libpython" not in linked and "libtorch_python" not in linked


def test_core_example_in_cpp(tmp_path: Path) -> None:
    source, built = ROOT / "examples" / "core_cpp", ROOT / "build"
    # The core's objects are those of `make build`, where that is how the library was built.
    options = [f"-DFTBERT_KERNELS_OF={built}"] if list(built.glob("CMakeFiles/ftbert_*.dir/csrc")) else []
    for command in (["cmake", "-S", str(source), "-B", str(tmp_path), *options], ["cmake", "--build", str(tmp_path), "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([str(tmp_path / "tiny_encoder")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cosine of the two sentences" in done.stdout


def example(name: str, *arguments: object) -> list[str]:
    """The lines that it prints."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_a_test() -> None:
    """Those with clients: test_clients.py."""
    tests = "".join((ROOT / "tests" / f"test_{name}.py").read_text() for name in ("examples", "ray"))
    names = {path.stem if path.is_file() else path.name for path in (ROOT / "examples").iterdir()}
    others = {"clients", "ray-requirements", "sample", "__pycache__"}
    assert not [name for name in names - others if f'"{name}"' not in tests and f'"{name}.py"' not in tests]


@pytest.mark.parametrize("name", ["matryoshka", "late_interaction", "reranking"])
def test_examples_of_vectors_and_scores(tmp_path: Path, name: str) -> None:
    from other_folders import colbert_folder, scored
    from tokenizers_offline import sentence_folder

    made = {"matryoshka": sentence_folder, "late_interaction": colbert_folder, "reranking": scored}[name](tmp_path)
    lines = example(name, made, *([8, 64] if name == "matryoshka" else []))
    assert len(lines) == (2 if name == "reranking" else 3)


def test_the_first_example(minilm_folder: Path) -> None:
    closest, *pair = example("quickstart", minilm_folder)
    assert closest.startswith("closest (0.6") and [text[:10] for text in pair] == ["  How do I", "  I cannot"]


def test_a_pipeline_that_is_optimized(tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    lines = example("pipelines", tiny_bert(tmp_path, num_hidden_layers=1, max_position_embeddings=1536))
    difference = next(line for line in lines if "largest difference" in line)
    assert 0 < float(difference.split()[-1]) < 1e-5 and lines[-1] == "transformers again, bit for bit: True"


def test_a_picture_of_similarities(tmp_path: Path) -> None:
    """What ftbert embed wrote, as make run shows it."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    (texts := tmp_path / "texts.txt").write_text("a cat\na dog\nthe sea\n")
    np.save(tmp_path / "vectors.npy", np.array([[1, 0.1, 0], [1, 0, 0.1], [0, 0, 1]], np.float32))
    lines = example("similarity", texts, tmp_path / "vectors.npy", tmp_path / "out.png")
    assert lines[:2] == ["  0.990  a cat", "         a dog"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [0, 2])
def test_a_model_over_several_ranks(tmp_path: Path, processes: int) -> None:
    from tokenizers_offline import sentence_folder

    made = sentence_folder(tmp_path)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / "tensor_parallel.py"), str(made)]
    command += ["one text", "another", "--dtype", "fp32", "--device", "cpu" if processes else "cpu,cpu"]
    here = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stderr
    vectors = ftbert.load(made).encode(["one text", "another"])
    lines = done.stdout.splitlines()
    assert [line[7:] for line in lines] == ["one text", "another"]
    assert abs(float(lines[1][:6]) - float(vectors[0] @ vectors[1])) < 1e-3


def test_finetuning_with_norms_has_the_same_losses(minilm_folder: Path, stsb_test: Path) -> None:
    without, first, with_, second, same = example("finetune_norm", minilm_folder, stsb_test, 2)
    assert without.startswith("without ftbert.norm") and with_.startswith("with ftbert.norm") and same == "the same losses"
    assert len(first.split()) == len(second.split()) == 2


def test_tracing_meets_every_method(model: ftbert.Model) -> None:
    """torch warns of each that the stand-in lacks, at every trace."""
    from ftbert._fake import _FakeEncoder

    methods = {name for name in model.encoder._method_names() if not name.startswith("__")}
    assert methods and not {name for name in methods if not hasattr(_FakeEncoder, name)}


class Classifier(torch.nn.Module):
    """A model that contains ours, as a user would write it: ops before and after."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = torch.nn.Linear(64, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.encoder(ids.clamp(min=0), mask)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        scores: torch.Tensor = self.head(pooled)
        return scores


def other_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 100, (3, 11), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(11) < torch.tensor([[11], [4], [1]])).long()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_without_graph_breaks(model: ftbert.Model, backend: str) -> None:
    classifier = Classifier(model.module).eval()
    compiled = torch.compile(classifier, fullgraph=True, backend=backend)
    for ids, mask in ((IDS, MASK), other_batch()):
        torch.testing.assert_close(compiled(ids, mask), classifier(ids, mask), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_compile_packed(model: ftbert.Model) -> None:
    compiled = torch.compile(model.module.forward_packed, fullgraph=True, backend="aot_eager")
    ids, cu = IDS[MASK.bool()], torch.tensor([0, 5, 12], dtype=torch.int32)
    assert torch.equal(compiled(ids, cu, 7), model.forward_packed(ids, cu, 7))


@torch.no_grad()
def test_export_with_free_batch_and_length(model: ftbert.Model, tmp_path: Path) -> None:
    # strict=True, no longer torch's default, leaves its stand-in for the encoder in the program (torch 2.13).
    classifier = Classifier(model.module).eval()
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=2, max=128)}
    program = torch.export.export(classifier, (IDS, MASK), dynamic_shapes=(axes, axes))
    torch.export.save(program, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    for ids, mask in ((IDS, MASK), other_batch()):
        torch.testing.assert_close(program.module()(ids, mask), classifier(ids, mask), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", "sequence_classification"), ("bert", "token_classification"), ("bert", "masked_lm"),
        ("bert", "question_answering"), ("modernbert", "sequence_classification"), ("qwen3", "sequence_classification"),
    ],
)  # fmt: skip
def test_export_with_a_head(family: str, task: str, tmp_path: Path) -> None:
    """Over the first token, every token, the word table, a mean and the last token."""
    model = ftbert.load(make_model(family, task, 1), device="cpu")
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=2, max=50)}
    torch.export.save(torch.export.export(model.module, (IDS, MASK), dynamic_shapes=(axes, axes)), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for ids, mask in ((IDS, MASK), other_batch(), (IDS, MASK * 0)):
        torch.testing.assert_close(program(ids, mask), model.module(ids, mask), atol=1e-6, rtol=1e-6)


class Named(torch.nn.Module):
    """Calls the op by names: an op that takes an object comes to its fake without the dispatcher."""

    def __init__(self, model: ftbert.Model) -> None:
        super().__init__()
        self.encoder = model.encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.ops.ftbert.forward_batch(
            self.encoder, ids, mask, token_type_ids=None, cu_seqlens=None, max_seqlen=0, want=["first"]
        )[0]


@torch.no_grad()
def test_export_of_arguments_by_name(model: ftbert.Model) -> None:
    module = Named(model)
    assert torch.equal(torch.export.export(module, (IDS, MASK)).module()(IDS, MASK), module(IDS, MASK))


class Packed(torch.nn.Module):
    """Packed ids, with the longest length as a tensor or as an int."""

    def __init__(self, model: ftbert.Model) -> None:
        super().__init__()
        self.module = model.module

    def forward(self, ids: torch.Tensor, cu: torch.Tensor, longest: Any) -> torch.Tensor:
        longest = longest.item() if isinstance(longest, torch.Tensor) else longest
        hidden: torch.Tensor = self.module.forward_packed(ids, cu, longest)
        return hidden


@torch.no_grad()
@pytest.mark.parametrize("longest", [torch.tensor(7), 7], ids=["tensor", "int"])
def test_package_of_packed_ids(longest: torch.Tensor | int, tmp_path: Path) -> None:
    packed, ids = Packed(ftbert.load(make_bert(), device="cpu")), IDS[MASK.bool()]
    inputs, file = (ids, torch.tensor([0, 5, 12], dtype=torch.int32), longest), str(tmp_path / "model.pt2")
    third = torch.export.Dim.DYNAMIC if isinstance(longest, int) else None
    axes = ({0: torch.export.Dim("tokens")}, {0: torch.export.Dim("ends")}, third)
    torch._inductor.aoti_compile_and_package(torch.export.export(packed, inputs, dynamic_shapes=axes), package_path=file)
    if isinstance(longest, int):  # docs/cpp.md says so; where torch has learnt it, page and test change
        with pytest.raises(RuntimeError, match="as_int or as_sym_int for argument 5 but got as_none"):
            torch._inductor.aoti_load_package(file)
        return
    program = torch._inductor.aoti_load_package(file)
    for given in (inputs, (torch.arange(5, 25), torch.tensor([0, 9, 12, 20], dtype=torch.int32), torch.tensor(9))):
        assert torch.equal(program(*given), packed(*given))
