"""Random calls of ftbert's ops, classes and models: what a seed calls. tests/fuzz_ops.py runs them.

Most calls are valid ones with one to three arguments made wrong, so that they come as far as the kernels; the others are
random throughout. Nothing is left out: every op that the library registers, every dtype and layout of torch, strides,
storages that are too short, and integers at the ends of their ranges.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from families import make_model
from op_library import load_test_ops
from torch import Tensor

import ftbert
import ftbert.norm  # registers what ops are on the CPU

load_test_ops()  # before they are asked for

INTEGERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 8, 2**31 - 1, 2**31, 2**32, 2**40, 2**58, 2**62, 2**63 - 1]
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
WANTS = (
    ("tokens", "pooled"), ("first", "pooled"), ("last",), ("rows",), ("packed_tokens", "packed_index", "cu_seqlens"),
    ("hidden_states",), (),
)  # fmt: skip
WORDS = ["gelu", "none", "tanh", "mean", "cls", "last", "absolute", "from_padding", "fp32", "bf16", "rms", "layer", "", "embeddings.word", "\x00ü"]
Call = tuple[str, Callable[..., Any], list[Any]]


def op_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("ftbert::") for name in names if name.startswith("ftbert::"))


def valid(name: str, device: str) -> list[Any]:
    """Arguments that the op takes: two sequences, of 4 and 2 tokens in 5 columns; 2 heads of 32."""

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    cu = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    ids = torch.arange(10, device=device).view(2, 5)
    index = torch.tensor([0, 1, 2, 3, 5, 6, 0], device=device)
    columns = torch.tensor([0, 2, 3, 9, 0, 1], dtype=torch.int32, device=device)
    bias, x, vector = floats(2, 17), floats(6, 64), floats(64)
    encoder = models(device)[0].encoder
    arguments: dict[str, list[Any]] = {
        "add_bias_act": [x, vector, "gelu"],
        "add_bias_act_": [x, vector, "gelu"],
        "add_bias_gate": [x, vector, "silu"],
        "quantise": [x, torch.ones(1, device=device)],
        "add_bias_input_layernorm": [x, vector, floats(6, 64), vector, vector, 1e-5, "rms", 1.0, "before_gamma", True],
        "add_position_products": [
            floats(2, 2, 5, 5), floats(2, 2, 5, 8), floats(2, 2, 5, 8), cu, columns, floats(2, 8, 32), floats(2, 8, 32),
            torch.tensor([0, 1, 1, 3, 31], dtype=torch.int32, device=device),
        ],
        "add_qkv_bias": [floats(6, 192), floats(192), cu, 5, 2],
        "argmax": [x],
        "max_sim": [x, cu, floats(6, 64), cu],
        "attention": [floats(6, 192), cu, 4, 2, bias, columns, False],
        "attention_apart": [x, x, x, cu, cu, 4, 2, 2, 0.5, -1, -1, cu[1:].clone()],
        "table": ["activations"],
        "batch_norm_apply": [x, floats(6, 64), vector, vector, vector, vector.square(), 1e-5, "relu", True, True],
        "batch_norm_backward": [x, floats(6, 64), None, columns.new_zeros(12), vector, vector, vector, vector.square(), 1e-5, "relu", True, [True, True, True]],
        "batch_norm_statistics": [x, floats(64), floats(64), index[1:2].clone(), 0.1],
        "build_info": [],
        "gpu": [0],
        "busy_cores": [],
        "follow_busy_cores": [True, False],
        "byte_rows": [x, vector],
        "embeddings_layernorm": [ids.flatten(), ids.flatten() % 2, index[:6], columns, floats(10, 64), floats(10, 64), floats(2, 64), vector, vector, 1e-5, "rms", 1.0, "once", 8.0],
        "gather_rows": [x, cu, "any", index[:4]],
        "quantize_q8_1": [floats(6, 64).float()],
        "dequantize_q8_0": [floats(16, 64).to(torch.int8), floats(16, 2).half(), torch.float32],
        "int8_product": [torch.ones(6, 128, dtype=torch.uint8, device=device), torch.ones(14, 64, dtype=torch.int8, device=device), floats(14), floats(14), "gelu", True],
        "product": [x, floats(64, 64), vector, "none", False, None, vector, x.clone(), vector, True, "rms", 1e-5, 1.0, "once"],
        "linear_e4m3": [x.to(torch.float8_e4m3fn), floats(1), floats(32, 64).to(torch.float8_e4m3fn), floats(32), floats(32).half(), torch.float16, "gelu", True, floats(1)],
        "linear_own": [x, floats(64, 64).to(torch.int8), vector, "gelu", "few_rows", "8x8", True, floats(64, 2).half(), None, vector, vector, 1e-5, "rms", 1.0, "once"],
        "rms_norm": [x, vector, 1e-5],
        "rope": [x.view(6, 4, 16), columns, floats(10, 8, 2), True],
        "silu_mul": [x],
        "linear_norm": [x.to(torch.float8_e4m3fn), floats(64, 64).to(torch.float8_e4m3fn), vector.half(), x.half(), vector.half(), vector.half(), 1e-5, "64x128", "rms", 1.0, "once", True, floats(1), floats(64), floats(1), None, 0],
        "linear_turned": [x, floats(192, 64), floats(192), columns, floats(10, 16, 2), 1, "wgmma_tile", "128x64", 1, False, "rms", vector, None, vector, None, 1e-6, 0.0, "once"],
        "pack_q8_0": [floats(16, 64).to(torch.int8), floats(16, 2).half()],
        "pack_weight": [floats(7, 64)],
        "norm_backward": [x, floats(6, 64), floats(6, 64), False, floats(6), floats(6), vector, vector, [64], 1e-5, "layer", 0.0, torch.float32, True, True],
        "norm_forward": [x, floats(6, 64), vector, vector, [64], 1e-5, "layer", 0.0, torch.float32, True],
        "padding": [torch.ones_like(ids)],
        "padding_positions": [ids, index, cu, 6, "from_padding", 1],
        "padding_stage": [ids, ids % 2, index, cu, 6, 8, 4],
        "pooling": [x, cu, "mean", True],
        "relu_backward_from_mask": [x, columns.new_zeros(12)],
        "relu_with_mask": [x],
        "restore_padding": [x, torch.tensor([0, 1, -1, 5], dtype=torch.int32, device=device)],
        "repeat_prefix": [torch.tensor([2, 4], dtype=torch.int32, device=device), 2, floats(8, 32), floats(8, 32)],
        "rotary": [floats(6, 192), columns, floats(10, 16, 2), 2, 2, False, "rms", floats(32), None, floats(32), None, 1e-6, 0.0, "once"],
        "rotary_angles": [torch.ones(3, dtype=torch.float64, device=device), 1.0, 2.0, 4, columns, cu],
        "rotary_table": [torch.ones(3, dtype=torch.float64, device=device), 1.0, 5],
        "store_keys_values": [floats(6, 128), torch.tensor([4, 0, -1, 9, 2, 7], dtype=torch.int32, device=device), 2, 1, floats(8, 32), floats(8, 32)],
        "softmax": [floats(2, 2, 5, 5), cu, 0.5, bias, columns, torch.float32],
        "time_products": [["fp32"]],
        "transpose": [floats(2, 2, 5, 32), cu, 6],
        "read_config": [encoder.config()],
    }  # fmt: skip
    if name in arguments:
        return arguments[name]
    flat = ids.flatten()[:6]
    if name == "forward_packed":  # the encoder's method
        return [encoder, flat, cu, 4, flat % 2]
    if name == "forward":
        return [encoder, ids, torch.ones_like(ids), ids % 2]
    want = list(WANTS[int(ids.sum()) % len(WANTS)])
    rows = index[:3] if "rows" in want else None
    if int(ids[0, 0]) % 2:
        return [encoder, flat, None, flat % 2, cu, 4, [one for one in want if one != "packed_index"], rows, 0]
    return [encoder, ids, torch.ones_like(ids), ids % 2, None, 0, want, rows, 0]


@cache
def models(device: str) -> list[ftbert.Model]:
    """Every way to positions, both paths of attention, causal; few positions, so that they run out."""
    made = [("bert", "encoder", "auto"), ("roberta", "sequence_classification", "auto"), ("mpnet", "encoder", "auto"), ("mpnet", "encoder", "general")]
    made += [("bert", "masked_lm", "general"), ("qwen3", "encoder", "auto")]
    return [
        ftbert.load(make_model(family, task, 2, max_position_embeddings=22), device=device, attention=path)
        for family, task, path in made
    ]


@cache
def without_positions(device: str) -> Any:
    """An encoder that no number of positions bounds."""
    model = models(device)[2]
    config = json.loads(model.encoder.config())
    config["positions"]["kind"], config["relative_bias"]["span"] = "none", 4
    weights = model.encoder.weights()
    del weights["embeddings.position"]
    weights["attention.relative_bias"] = weights["attention.relative_bias"][:, :7]
    return torch.classes.ftbert.Encoder(weights, json.dumps(config), "auto")


# ---- wrong arguments -----------------------------------------------------------------------------------------------


def exotic(rng: random.Random, t: Tensor) -> Tensor:
    """The same elements, or as many, in another kind of tensor."""
    floats = t.float() if t.is_floating_point() else t.to(torch.float32)
    return rng.choice(
        [
            lambda: t.to_sparse(),
            lambda: floats.reshape(-1, 1).to_sparse_csr(),
            lambda: floats.to_mkldnn(),
            lambda: torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([t.flatten()[:2], t.flatten()[:1]]),
            lambda: torch.nested.nested_tensor([t.flatten()[:2], t.flatten()[:1]], layout=torch.jagged),
            lambda: t.to("meta"),
            lambda: torch._efficientzerotensor(t.shape),
            lambda: torch.randn(t.shape, dtype=torch.complex64).conj(),
            lambda: torch.randn(t.shape, dtype=torch.complex64).conj().imag,
            lambda: t.clone().requires_grad_() if t.is_floating_point() else t,
            lambda: torch.nn.Parameter(floats),
        ]
    )()  # type: ignore[no-any-return]


def shrink(t: Tensor) -> Tensor:
    """Its storage no longer holds it."""
    t = t.clone()
    t.untyped_storage().resize_(max(0, t.untyped_storage().nbytes() // 2))
    return t


def lost(t: Tensor) -> bool:
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + t.storage_offset() + 1
    return t.numel() > 0 and t.untyped_storage().nbytes() < reach * t.element_size()


def spoil(rng: random.Random, t: Tensor) -> Tensor:
    """One tensor made another. What has lost its storage stays so: torch itself would read behind it."""
    if t.layout == torch.strided and not t.is_nested and t.device.type != "meta" and lost(t):
        return t
    flat = t.reshape(-1)
    if not t.is_floating_point() and t.dtype != torch.bool and t.numel() and rng.random() < 0.5:
        t = t.clone()
        limits = torch.iinfo(t.dtype)
        for _ in range(rng.choice([1, 1, 2, 5])):
            value = rng.choice([*INTEGERS, 4, 6, 7, 9, 10, 11])
            t.view(-1)[rng.randrange(t.numel())] = min(max(value, limits.min), limits.max)
        return t
    size = rng.choice([0, 1, 2, 3, 5, 6, 17, 64, 300])
    return rng.choice(
        [
            lambda: exotic(rng, t),
            lambda: t.to(rng.choice(DTYPES)),
            lambda: wild_tensor(rng, t.device),
            lambda: shrink(t),
            lambda: t.transpose(0, -1) if t.dim() else t,
            lambda: t[..., ::2] if t.dim() else t[None],
            lambda: t[:0] if t.dim() else t,
            lambda: t[..., :0] if t.dim() else t,
            lambda: t[1:] if t.dim() else t,
            lambda: t[None],
            lambda: flat,
            lambda: flat[:1].squeeze(0) if t.numel() else t,
            lambda: flat[:1].expand(size),
            lambda: flat.repeat(max(1, size))[: flat.numel() + size],
            lambda: torch.cat([t, t]) if t.dim() else t,
            lambda: flat.as_strided((size,), (0,)) if t.numel() else t,
            lambda: t * float("nan") if t.is_floating_point() else -t.long(),
        ]
    )()  # type: ignore[no-any-return]


def wild_tensor(rng: random.Random, device: Any = "cpu") -> Tensor:
    shape = [rng.choice([0, 1, 2, 3, 5, 6, 10, 64, 192]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
    if rng.random() < 0.15 and shape:  # as large as nothing lies behind it
        shape[rng.randrange(len(shape))] = 0
        shape[rng.randrange(len(shape))] = rng.choice([2**20, 2**31, 2**40, 0])
    while len(shape) == 4 and torch.Size(shape).numel() > 10**6:
        shape.pop()
    dtype = rng.choice([torch.float32, torch.int32, torch.int64, rng.choice(DTYPES)])
    t = torch.empty(shape, device=device, dtype=torch.int64 if torch.Size(shape).numel() < 10**7 else torch.uint8)
    return t.random_(-3, 12).to(dtype) if t.dtype == torch.int64 else t.fill_(1).to(dtype)


def wild(rng: random.Random, device: str) -> Any:
    return rng.choice(
        [
            lambda: wild_tensor(rng, device),
            lambda: spoil(rng, torch.arange(6, device=device)),
            lambda: exotic(rng, torch.ones(2, 5, dtype=torch.int64)),
            lambda: rng.choice(INTEGERS),
            lambda: rng.choice([0.0, -1.0, 1e-5, 1e300, float("nan"), float("inf")]),
            lambda: rng.choice(WORDS),
            lambda: rng.choice(DTYPES),
            lambda: None,
            lambda: rng.choice([True, False]),
            lambda: rng.choice(models(device)).encoder,
            lambda: {rng.choice(WORDS): rng.choice(["1", "-1", "x"])},
        ]
    )()


def change(rng: random.Random, value: Any, device: str) -> Any:
    """An argument made wrong, most often within its type."""
    if rng.random() < 0.05:
        return wild(rng, device)
    if isinstance(value, Tensor):
        return None if rng.random() < 0.1 else spoil(rng, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*INTEGERS, value - 1, value + 1])
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1e300, float("nan"), float("inf")])
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, torch.dtype):
        return rng.choice(DTYPES)
    if isinstance(value, torch._C.ScriptObject):
        return rng.choice([*(model.encoder for model in models(device)), without_positions(device)])
    if hasattr(value, "keys") and len(value):
        value = dict(value)
        key = rng.choice(sorted(value))
        old = value.pop(key)
        if rng.random() < 0.8:
            value[key] = change(rng, old, device) if isinstance(old, Tensor) else rng.choice([str(rng.choice(INTEGERS)), "nan", "", "none"])
    return value


def made(make: Callable[[], Any], otherwise: Any) -> Any:
    """torch has no such tensor of every dtype."""
    try:
        return make()
    except (RuntimeError, ValueError, TypeError, IndexError):
        return otherwise


# ---- calls ---------------------------------------------------------------------------------------------------------


def _method(rng: random.Random, device: str) -> Call:
    """Of torch.classes.ftbert.Encoder, also its constructor."""
    encoder = rng.choice([*(model.encoder for model in models(device)), without_positions(device)])
    name = rng.choice(["forward", "forward", "forward_packed", "forward_packed", "weight", "to", "__init__", "use_cuda_graphs"])
    if name == "__init__":
        return name, torch.classes.ftbert.Encoder, [encoder.weights(), encoder.config(), rng.choice(["auto", "general"])]
    arguments = {"weight": ["embeddings.word"], "to": [torch.device(rng.choice(["cpu", "meta", "mps" if torch.cuda.is_available() else "cuda:9"])), "fp32"], "use_cuda_graphs": [True]}
    return name, getattr(encoder, name), arguments.get(name, valid(name, device)[1:])


def _model(rng: random.Random, device: str) -> Call:
    model = rng.choice(models(device))
    columns = rng.choice([1, 5, 20, 23, 60])
    ids = torch.randint(0, 12, (2, columns), device=device, generator=torch.Generator(device).manual_seed(rng.randrange(99)))
    mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(rng.randrange(99))) < rng.random()).to(device)
    name = rng.choice(["__call__", "__call__", "module", "forward_packed", "logits_packed", "masked_lm_logits"])
    if name == "module":
        return name, model.module, [ids, mask.long(), None]
    if name == "masked_lm_logits":
        return name, lambda *given: models(device)[4].masked_lm_logits(*given[1:], positions=given[0]), [mask, ids, None, None]
    if name == "__call__":
        return name, model, [ids, rng.choice([mask, mask.long(), mask.float(), None]), rng.choice([ids % 2, None])]
    cu = torch.tensor([0, columns, 2 * columns], dtype=torch.int32, device=device)
    if name == "forward_packed" and rng.random() < 0.5:
        model, shared = rng.choice([(model, 0), (models(device)[5], columns)])
        return name, lambda *given: model.forward_packed(*given[:4], want=given[4], shared_prefix=given[5]), [
            ids.flatten(), cu, columns + shared, None, rng.choice(["first", "last", "pooled", "hidden_states"]), shared]  # fmt: skip
    return name, getattr(model, name), [ids.flatten(), cu, columns, None]


def fails_in_torch(function: Any, value: Any) -> bool:
    """Before ftbert is asked: jagged tensors, in methods and in rms_norm, which torch takes for its own by the name."""
    if not isinstance(value, Tensor) or value.layout != torch.jagged:
        return False
    return isinstance(function, torch.ScriptMethod) or function is torch.ops.ftbert.rms_norm


def make_call(seed: int, device: str = "cpu") -> Call:
    """What `seed` calls: a name for the report, the callable and its arguments."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.random()
    if kind < 0.15:
        name, function, arguments = _model(rng, device)
    elif kind < 0.3:
        name, function, arguments = _method(rng, device)
    else:
        name = rng.choice(op_names())
        function, arguments = getattr(torch.ops.ftbert, name), valid(name, device)
        if rng.random() < 0.1:
            arguments = [made(lambda: wild(rng, device), None) for _ in arguments]
            return name, function, [None if fails_in_torch(function, one) else one for one in arguments]
    arguments = [copy.copy(one) if isinstance(one, dict) else one for one in arguments]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3]) if arguments else 0):
        which = rng.randrange(len(arguments))
        changed = made(lambda which=which: change(rng, arguments[which], device), arguments[which])
        if not fails_in_torch(function, changed):
            arguments[which] = changed
    return name, function, arguments
