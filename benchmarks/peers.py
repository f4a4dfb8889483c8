"""The ways of running one BERT that the benchmark compares: ours and PyTorch's; benchmarks/runtimes.py has those that
take the model as ONNX or convert it. A peer is a small class; `PEERS` lists them.

A peer is built from the float32 transformers model, prepares what it likes, and gets a batch: `prepare(batch)` is not
timed and returns the call that is. That call gives the last hidden state: padded [batch, seq, hidden], or one row per
valid token. Whatever raises is reported as a row that says so.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Call = Callable[[], Tensor]
E4M3 = torch.float8_e4m3fn  # of a run in fp8
EIGHT_BITS = {E4M3: "fp8", torch.int8: "int8"}
EIGHT_BITS_LIMIT = 2.0  # of 24 layers of random weights; two unrelated results are 8 apart


@dataclass(frozen=True)
class Batch:
    """Right-padded ids, the same ones packed; all on the peers' device. ids, mask int64 [batch, seq]."""

    ids: Tensor
    mask: Tensor
    lengths: list[int]

    @property
    def valid(self) -> Tensor:
        return self.mask.bool()

    @property
    def packed(self) -> Tensor:
        return self.ids[self.valid]

    @property
    def cu_seqlens(self) -> Tensor:
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return ends.to(self.ids.device, torch.int32)


class Peer:
    """One contestant. tolerance: largest error at valid tokens, of 16-bit types 64 roundings, of 8 bits
    EIGHT_BITS_LIMIT; None: any that is finite, which the report then shows."""

    name: ClassVar[str]
    devices: ClassVar[Sequence[str]] = ("cpu",)
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.float16, torch.bfloat16)  # of runs it is in
    needs: ClassVar[str] = "torch"  # the package whose version is recorded
    tolerance: float | None = 1e-3
    on_request: ClassVar[bool] = False  # runs only when asked for
    compiles_each_point: ClassVar[bool] = False
    families: ClassVar[Sequence[str]] = ()  # model_type of the models that it can run; empty: all

    def __init__(self, reference: Any, device: torch.device, dtype: torch.dtype, threads: int) -> None:
        self.device, self.dtype, self.threads = device, dtype, threads
        self.setup(reference)

    def setup(self, reference: Any) -> None:
        self.model = copy.deepcopy(reference).to(self.device, self.dtype)

    def prepare(self, batch: Batch) -> Call:
        raise NotImplementedError

    def passes(self, error: float) -> bool:
        rounded = EIGHT_BITS_LIMIT if self.dtype in EIGHT_BITS else 64 * torch.finfo(self.dtype).eps
        most = math.inf if self.tolerance is None else max(self.tolerance, rounded)
        return math.isfinite(error) and error <= most

    @classmethod
    def available(cls) -> bool:
        return importlib.util.find_spec(cls.needs) is not None


class Ftbert(Peer):
    """Input ids and mask in, restored padded hidden state out, like everybody else."""

    name = "ftbert"
    devices: ClassVar[Sequence[str]] = ("cpu", "cuda")
    dtypes: ClassVar[Sequence[torch.dtype]] = (*Peer.dtypes, *EIGHT_BITS)

    def setup(self, reference: Any) -> None:
        import ftbert

        if word := EIGHT_BITS.get(self.dtype):
            from quantized import quantized_folder

            self.model = ftbert.load(quantized_folder(reference, self.dtype), device=self.device, dtype=word)
        else:
            self.model = ftbert.load(reference, device=self.device, dtype=self.dtype)

    def prepare(self, batch: Batch) -> Call:
        return lambda: self.model(batch.ids, batch.mask).last_hidden_state


class FtbertPacked(Ftbert):
    """forward_packed: what a server calls that packs its requests itself. No host synchronisation."""

    name = "ftbert, packed"
    devices = ("cuda",)

    def prepare(self, batch: Batch) -> Call:
        ids, cu, longest = batch.packed, batch.cu_seqlens, max(batch.lengths)
        return lambda: self.model.forward_packed(ids, cu, longest)


class FtbertPackedRecorded(FtbertPacked):
    """forward_packed in a CUDA graph of the caller's: beside the next, which differs in nothing but the table."""

    name = "ftbert, packed, recorded"
    on_request = True
    with_table: ClassVar[bool] = True

    def prepare(self, batch: Batch) -> Call:
        from ftbert.tuning import gemm_table

        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        rows = gemm_table.in_force(gemm_table.Machine.of(self.device))
        call, graph = super().prepare(batch), torch.cuda.CUDAGraph()
        gemm_table.put_in_force(index, rows if self.with_table else [])
        try:
            call()
            with torch.cuda.graph(graph):
                out = call()
        finally:
            gemm_table.put_in_force(index, rows)

        def replay(_: Call = call) -> Tensor:  # the graph reads the memory that the call holds
            graph.replay()
            return out

        return replay


class FtbertPackedNoTable(FtbertPackedRecorded):
    """What runs on a GPU that no tuned table is for."""

    name = "ftbert, packed, recorded, no table"
    with_table = False


class FtbertPackedBf16(FtbertPacked):
    """In a run in fp16: the two types beside each other, under the same clock."""

    name = "ftbert, packed, bf16"
    dtypes = (torch.float16,)

    def setup(self, reference: Any) -> None:
        self.dtype = torch.bfloat16
        super().setup(reference)


class Eager(Peer):
    name = "transformers (sdpa)"
    devices = ("cpu", "cuda")
    needs = "transformers"

    def prepare(self, batch: Batch) -> Call:
        return lambda: self.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state


class OneByOne(Peer):
    """No padding, no batching."""

    name = "transformers, one by one"
    needs = "transformers"

    def prepare(self, batch: Batch) -> Call:
        rows = [row[:length][None] for row, length in zip(batch.ids, batch.lengths, strict=True)]
        return lambda: torch.cat([self.model(input_ids=row).last_hidden_state[0] for row in rows])


class Compiled(Peer):
    name = "torch.compile"
    mode = "default"
    compiles_each_point = True

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        # The pool of compiling processes outlives the compilation and takes time from the peers on the CPU.
        torch._inductor.config.compile_threads = 1
        self.compiled = torch.compile(self.model, mode=self.mode, dynamic=False)

    def prepare(self, batch: Batch) -> Call:
        return lambda: self.compiled(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state


class CompiledGraphs(Compiled):
    name = "torch.compile reduce-overhead"
    devices = ("cuda",)
    mode = "reduce-overhead"
    on_request = True


class CompiledTuned(CompiledGraphs):
    name = "torch.compile max-autotune"
    mode = "max-autotune"


class FastPath(Peer):
    """nn.TransformerEncoder: fused layers, padding removed by nested tensors."""

    name = "nn.TransformerEncoder fast path"
    devices = ("cpu", "cuda")
    families = ("bert",)

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        c = self.model.config
        layer = torch.nn.TransformerEncoderLayer(
            c.hidden_size, c.num_attention_heads, c.intermediate_size, activation="gelu", batch_first=True,
            layer_norm_eps=c.layer_norm_eps,
        )  # fmt: skip
        self.encoder = torch.nn.TransformerEncoder(layer, c.num_hidden_layers, enable_nested_tensor=True)
        for ours, theirs in zip(self.encoder.layers, self.model.encoder.layer, strict=True):
            at = theirs.attention
            heads = (at.self.query, at.self.key, at.self.value)
            pairs = {
                "self_attn.in_proj_weight": torch.cat([h.weight for h in heads]),
                "self_attn.in_proj_bias": torch.cat([h.bias for h in heads]),
            }
            for name, module in (
                ("self_attn.out_proj", at.output.dense), ("norm1", at.output.LayerNorm),
                ("linear1", theirs.intermediate.dense), ("linear2", theirs.output.dense),
                ("norm2", theirs.output.LayerNorm),
            ):  # fmt: skip
                pairs |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
            ours.load_state_dict(pairs)
        self.encoder = self.encoder.to(self.device, self.dtype).eval()

    def prepare(self, batch: Batch) -> Call:
        padding = None if bool(batch.valid.all()) else ~batch.valid

        def call() -> Tensor:
            out: Tensor = self.encoder(self.model.embeddings(batch.ids), src_key_padding_mask=padding)
            return out

        return call


class RecordedPacked(Peer):
    """Tokens packed before the clock starts, a forward pass that its subclass compiles, replayed from a CUDA graph."""

    devices = ("cuda",)
    dynamic: ClassVar[bool] = False
    rotates_in_float: ClassVar[bool] = True

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        if self.dtype == torch.float32:
            raise RuntimeError("FlashAttention needs fp16 or bf16")

    def compile(self) -> None:
        self.make_parts(partial(torch.compile, dynamic=self.dynamic))

    def make_parts(self, compiled: Callable[[Any], Any]) -> None:
        """The functions that `forward` calls, each by `compiled`."""
        raise NotImplementedError

    @property
    def angle_dtype(self) -> torch.dtype:
        return torch.float32 if self.rotates_in_float else self.dtype

    def matrix(self, weight: Tensor, reader: str) -> Any:  # noqa: ARG002
        """What `linear` gets of a matrix. reader: transformers' module that reads what it multiplies."""
        return weight

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def forward(self, ids: Tensor, positions: Tensor, cu: Tensor, longest: int) -> Tensor:
        raise NotImplementedError

    def prepare(self, batch: Batch) -> Call:
        if self.compiles_each_point:
            self.compile()
        ids, cu, longest = batch.packed, batch.cu_seqlens, max(batch.lengths)
        positions = torch.cat([torch.arange(n, device=self.device) for n in batch.lengths])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.forward(ids, positions, cu, longest)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = self.forward(ids, positions, cu, longest)

        def call(inputs: tuple[Tensor, ...] = (ids, positions, cu)) -> Tensor:  # the graph reads their memory
            graph.replay()
            return out

        return call


class WholeForward(RecordedPacked):
    """A mixin before the class of a peer: its forward pass is compiled as a whole for each point's sizes, so that a
    layer's last operations fuse with the next one's first, and rotates in the run's type."""

    compiles_each_point = True
    rotates_in_float = False

    def compile(self) -> None:
        self.make_parts(lambda part: part)
        self.whole = torch.compile(super().forward, dynamic=False)

    def forward(self, ids: Tensor, positions: Tensor, cu: Tensor, longest: int) -> Tensor:
        return self.whole(ids, positions, cu, longest)  # type: ignore[no-any-return]


def mark_static(weights: Any) -> None:
    """An argument's shape would be a variable where sizes may change."""
    for tensor in tree_leaves(weights):
        if isinstance(tensor, Tensor):
            torch._dynamo.mark_static(tensor)


class PackedGraph(RecordedPacked):
    """What an expert writes in PyTorch for a GPU: tokens packed, QKV fused, FlashAttention varlen, torch.compile,
    replayed from a CUDA graph. One layer is compiled and serves them all: nothing of one fuses with the next."""

    name = "packed PyTorch compiled per point, CUDA graph"
    families = ("bert",)
    on_request = True
    compiles_each_point = True

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        self.layers = []
        for i, layer in enumerate(self.model.encoder.layer):
            at, out, name = layer.attention.self, layer.attention.output, f"encoder.layer.{i}"
            heads = (at.query, at.key, at.value)
            qkv = torch.cat([h.weight for h in heads]), torch.cat([h.bias for h in heads])
            up, down = layer.intermediate.dense, layer.output.dense
            self.layers.append([
                self.matrix(qkv[0], f"{name}.attention.self.query"), qkv[1],
                self.matrix(out.dense.weight, f"{name}.attention.output.dense"), out.dense.bias,
                out.LayerNorm.weight, out.LayerNorm.bias,
                self.matrix(up.weight, f"{name}.intermediate.dense"), up.bias,
                self.matrix(down.weight, f"{name}.output.dense"), down.bias,
                layer.output.LayerNorm.weight, layer.output.LayerNorm.bias,
            ])  # fmt: skip
            mark_static(self.layers[-1])

    def make_parts(self, compiled: Callable[[Any], Any]) -> None:
        self.embed, self.run = compiled(self.embeddings), compiled(self.layer)

    def embeddings(self, ids: Tensor, positions: Tensor) -> Tensor:
        e = self.model.embeddings
        out: Tensor = e.LayerNorm(
            e.word_embeddings(ids) + e.position_embeddings(positions) + e.token_type_embeddings.weight[0]
        )
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, False, False)[0]
        return out

    def layer(self, x: Tensor, weights: list[Any], cu: Tensor, longest: int) -> Tensor:
        qkv, qkv_bias, out, out_bias, gamma, beta, up, up_bias, down, down_bias, last_gamma, last_beta = weights
        c, linear, norm = self.model.config, self.linear, torch.nn.functional.layer_norm
        heads, hidden, eps = c.num_attention_heads, (c.hidden_size,), c.layer_norm_eps
        q, k, v = linear(x, qkv, qkv_bias).view(-1, 3, heads, c.hidden_size // heads).unbind(1)
        context = self.attend(q, k, v, cu, longest)
        x = norm(linear(context.reshape(-1, c.hidden_size), out, out_bias) + x, hidden, gamma, beta, eps)
        inner = torch.nn.functional.gelu(linear(x, up, up_bias))
        return norm(linear(inner, down, down_bias) + x, hidden, last_gamma, last_beta, eps)

    def forward(self, ids: Tensor, positions: Tensor, cu: Tensor, longest: int) -> Tensor:
        x: Tensor = self.embed(ids, positions)
        for weights in self.layers:
            x = self.run(x, weights, cu, longest)
        return x


class PackedGraphAnySize(PackedGraph):
    """The same, compiled once for every size, as a server would."""

    name = "packed PyTorch, CUDA graph"
    on_request = False
    compiles_each_point = False
    dynamic = True

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        self.compile()


PEERS: tuple[type[Peer], ...] = (
    Ftbert, FtbertPacked, FtbertPackedRecorded, FtbertPackedNoTable, FtbertPackedBf16, Eager, OneByOne, Compiled,
    CompiledGraphs, CompiledTuned, FastPath, PackedGraph, PackedGraphAnySize,
)  # fmt: skip
