"""The forward that `ftbert.optimize` gives a transformers encoder."""

from __future__ import annotations

import inspect
import threading
import types
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ftbert._library import load_library
from ftbert.checkpoint import POOLED, ModelConfig
from ftbert.converters import open_checkpoint
from ftbert.devices import check_device, check_dtype
from ftbert.dtypes import Dtype, parse_dtype
from ftbert.forked import note_fork
from ftbert.heads import Head, load_head
from ftbert.live_check import Differs, check_equal, in_both_types, sample_ids, tolerance, warn_of_rounding
from ftbert.optimization.call_arguments import (
    CallArguments,
    host_reads,
    pooled_column,
    read_packed,
    starts_with_padding,
    wants_hidden_states,
    why_original,
)
from ftbert.optimization.live_weights import Watch, build_encoder

load_library()  # before a fork, which it must see

_UNTRACEABLE = (
    "ftbert.optimize looks at each call's mask and at the weights before it computes, which cannot be traced; call "
    "ftbert.undo(model) first, or trace the module of ftbert.load(model)"
)


@dataclass(frozen=True)
class Settings:
    """dtype: as of `ftbert.load`; None follows the model (fp32 on the CPU)."""

    dtype: Dtype | None
    attention: str


@dataclass(frozen=True)
class _Built:
    encoder: Any
    config: ModelConfig
    watch: Watch
    device: torch.device
    out_dtype: torch.dtype
    output: type[Any]  # the dataclass that the original returns
    gaps: bool  # return_dict=False keeps None in the tuple (models of the older style)
    pooled: Head | None  # what makes the encoder's pooled output of the row that goes by ids or columns


class PatchedForward:
    """Callable as the forward of the encoder it was made for; `ftbert.optimize` documents what it computes.

    first_column: who reads column 0 of the output, which may be padding: "unread", "pooled" (the encoder's own pooler
    alone), or "read" (a head or another module may); "last": a head reads the last id that is no padding instead.
    tokenizer: transformers' own, for the calibration of fp8 and int8; None: that of the folder that the config names.
    fallbacks: how often the original ran instead, by reason. Thread-safe; a copied or unpickled model builds its own.
    """

    def __init__(
        self, encoder: nn.Module, settings: Settings, first_column: str = "read", tokenizer: Any = None
    ) -> None:
        # Weak: the model owns this object, and a cycle would keep its memory until the garbage collector comes.
        self._module = weakref.ref(encoder)
        self.settings = settings
        self.first_column = first_column
        self.tokenizer = tokenizer
        self.fallbacks: dict[str, int] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._built: _Built | None = None
        self.__signature__ = inspect.signature(types.MethodType(type(encoder).forward, encoder))
        self.__code__ = type(encoder).forward.__code__  # read by torch.export, which calls then and is told more
        self._arguments = CallArguments(self.__signature__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A frame of its own, which torch.compile can look into: with fullgraph=True it finds the reason there.
        return self._call(args, kwargs)

    @torch.compiler.disable(reason=_UNTRACEABLE)  # type: ignore[untyped-decorator]
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_traced():
            raise RuntimeError(_UNTRACEABLE)
        note_fork()
        module = self._owner()
        if module.training:
            raise RuntimeError(
                "this model was optimized by ftbert for inference, and is in training mode; call model.eval(), "
                "or ftbert.undo(model) to train it"
            )
        asked = self._arguments.bind(args, kwargs)
        reason = _why_not_looked_at(asked)
        if reason is not None:
            return self._fall_back(reason, args, kwargs)
        try:
            built = self.built()
        except (ValueError, Differs) as error:  # changed since into something that ftbert does not compute
            return self._fall_back(str(error), args, kwargs)
        mask = asked.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            # As transformers reads it: what is not 0 is kept. On the host, because the next check looks at it there,
            # and ftbert then does not wait for the device a second time.
            asked["attention_mask"] = mask = (mask != 0).cpu()
        hooked = "forward hooks on modules inside" if built.watch.hooked() else None
        reason = hooked or why_original(asked, module.config, built.config, self.first_column, built.pooled)
        if reason is not None:
            return self._fall_back(reason, args, kwargs)
        if asked["input_ids"].device != built.device:
            raise RuntimeError(
                f"input_ids: expected them on {built.device}, where the encoder is, got {asked['input_ids'].device}. "
                "torch.nn.DataParallel cannot copy an encoder of ftbert to other GPUs: call ftbert.undo(model) first, "
                "or run one process for each GPU"
            )
        self._say_what_differs(asked)
        return _forward(built, module, asked)

    def _say_what_differs(self, asked: dict[str, Any]) -> None:
        module = self._owner()
        if self.first_column == "pooled" and starts_with_padding(asked["input_ids"], asked.get("attention_mask")):
            self._warn_once(
                f"padding in column 0: the pooler_output of {type(module).__name__} is of each row's first "
                "kept token, where transformers takes the padding's"
            )
        attention = str(getattr(module.config, "_attn_implementation", None))
        if "flash" not in attention and read_packed(asked):
            self._warn_once(
                f"cu_seq_lens_q: the texts in input_ids are kept apart; with its {attention!r} attention "
                f"{type(module).__name__} of transformers lets them read each other"
            )

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(f"ftbert: {words}", stacklevel=6)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of transformers."""
        module = self._owner()
        return type(module).forward(module, *args, **kwargs)

    def built(self) -> _Built:
        """Builds again when the weights changed, moved or have another dtype."""
        built = self._built
        if built is not None and built.watch.unchanged():
            return built
        with self._lock:
            if self._built is None or not self._built.watch.unchanged():
                self._built = None  # frees the memory before the next is built
                self._built = _build(self._owner(), self.settings, self.tokenizer)
            return self._built

    def info(self) -> dict[str, str]:
        """Device, dtype and which kernels were chosen and why."""
        return dict(self.built().encoder.info())

    def _owner(self) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError("the model that ftbert optimized is gone; optimize the one you hold")
        return module

    def _fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reason not in self.fallbacks:
            name = type(self._owner()).__name__
            warnings.warn(f"ftbert: {reason}: {name} of transformers computes such calls", stacklevel=5)
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        return self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        # deepcopy has made the copy of the owner, still empty, before it comes to its attributes.
        owner = self._owner()
        return PatchedForward(memo.get(id(owner), owner), self.settings, self.first_column, self.tokenizer)

    def __reduce__(self) -> Any:
        return PatchedForward, (self._owner(), self.settings, self.first_column, self.tokenizer)


def _is_traced() -> bool:
    """Whether torch.jit, torch.export or make_fx records what is computed."""
    recording = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return recording or torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


def _why_not_looked_at(asked: dict[str, Any]) -> str | None:
    """Why ftbert may not look at weights and inputs in this call, or None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    ids = asked.get("input_ids")
    faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if faked or (isinstance(ids, Tensor) and (ids.is_meta or isinstance(ids, FakeTensor))):
        return "tensors without data"
    if host_reads(asked) and _is_recording(ids):
        # What stands in them decides what is launched, and the host cannot read it then.
        return "attention_mask, position_ids or offsets while a CUDA graph is recorded"
    return None


def _is_recording(ids: Any) -> bool:
    """Whether the caller records the launches of this call."""
    return isinstance(ids, Tensor) and ids.is_cuda and torch.cuda.is_current_stream_capturing()


def _build(module: Any, settings: Settings, tokenizer: Any) -> _Built:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) != 1:
        raise ValueError(f"the encoder's weights must be on one device; they are on {sorted(map(str, devices))}")
    device = check_device(devices.pop())
    own = next(p.dtype for p in module.parameters() if p.is_floating_point())
    dtype = compute_dtype(settings.dtype, own, device)
    # Not under the caller's inference_mode: the tensors live on.
    with torch.inference_mode(False), torch.no_grad():
        watch = Watch(module)
        checkpoint = open_checkpoint(module)
        encoder, config = build_encoder(module, checkpoint, device, dtype, settings.attention, tokenizer)
        # A few tokens through both: what the original returns, and that the two agree.
        ids = sample_ids(config.vocab, config.max_seq, device)
        mask = torch.ones_like(ids)
        forward = type(module).forward
        theirs = forward(module, ids, attention_mask=mask, return_dict=True)
        gaps = any(x is None for x in forward(module, ids, attention_mask=mask, return_dict=False))
        ours = torch.ops.ftbert.forward_batch(encoder, ids, None, None, None, 0, ["tokens"])[0]
        allowed, name = tolerance(encoder, own == torch.float32, device), type(module).__name__
        try:
            check_equal(ours, theirs.last_hidden_state, name, allowed)
        except Differs:
            both = in_both_types(module, dtype)
            if both[0] is None:
                raise
            exact, rounded = (forward(of, ids, attention_mask=mask, return_dict=True).last_hidden_state for of in both)
            check_equal(ours, exact, name, allowed, rounded=rounded)
            warn_of_rounding(name, dtype)
        read = next((head for head in checkpoint.config.heads if head.task == POOLED), None)
        pooled = None if read is None else load_head(checkpoint, read, device, own)
    return _Built(encoder, config, watch, device, own, type(theirs), gaps, pooled)


def compute_dtype(asked: Dtype | None, own: torch.dtype, device: torch.device) -> Dtype:
    """What the encoder computes in; ValueError for what ftbert does not compute in there."""
    if device.type != "cpu":
        wanted = parse_dtype(own if asked is None else asked)
        check_dtype(device, wanted)
        return wanted
    # 16 bit models too: fp32 is what the CPU is fast in, and it is nearer to what they mean.
    wanted = torch.float32 if asked is None and own in (torch.float16, torch.bfloat16) else parse_dtype(asked or own)
    check_dtype(device, wanted)
    return wanted


def _forward(built: _Built, module: Any, asked: dict[str, Any]) -> Any:
    ids, mask = asked["input_ids"], asked.get("attention_mask")
    kinds = asked.get("token_type_ids") if built.config.token_types else None
    config = module.config
    fields: dict[str, Any] = {}
    everything = wants_hidden_states(asked, config)
    want = ["tokens", "hidden_states"] if everything else ["tokens"]
    packed = read_packed(asked)
    if packed is None:
        made = torch.ops.ftbert.forward_batch(built.encoder, ids, mask, kinds, None, 0, want)
    else:
        row = (ids[0], None, None if kinds is None else kinds[0])
        cu_seqlens = packed.cu_seqlens.to(ids.device, torch.int32)
        made = torch.ops.ftbert.forward_batch(built.encoder, *row, cu_seqlens, packed.max_seqlen, want)
        made = [one.unsqueeze(-3) for one in made]
    hidden = made[0].to(built.out_dtype)
    if everything:
        states = made[1].to(built.out_dtype).unbind(0)
        fields["hidden_states"] = states if built.config.states_before_final_norm else (*states[:-1], hidden)
    start = hidden
    if mask is not None and starts_with_padding(ids, mask):  # only the pooler reads column 0 then
        first = mask.long().argmax(1).to(hidden.device)
        start = hidden[torch.arange(len(hidden), device=hidden.device), first][:, None]
    pooled = _pool(module, start)
    if built.pooled is not None:
        rows = hidden[torch.arange(len(hidden), device=hidden.device), pooled_column(built.pooled, ids)]
        pooled = built.pooled(rows, rows)  # no tied head
    if pooled is not None:
        fields["pooler_output"] = pooled
    out = built.output(last_hidden_state=hidden, **fields)
    wanted = asked.get("return_dict")
    if config.return_dict if wanted is None else wanted:
        return out
    return (hidden, None, *out.to_tuple()[1:]) if built.gaps else out.to_tuple()


def _pool(module: Any, hidden: Tensor) -> Tensor | None:
    """[batch, seq, hidden] -> [batch, hidden], through the model's own pooler; None if it has none."""
    pooler = getattr(module, "pooler", None)
    if pooler is None:
        return None
    if isinstance(pooler, nn.Linear):  # ALBERT keeps its activation beside it
        return module.pooler_activation(pooler(hidden[:, 0]))  # type: ignore[no-any-return]
    return pooler(hidden)  # type: ignore[no-any-return]
