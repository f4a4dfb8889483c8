"""optimize and undo: a HuggingFace model, its encoder computed by ftbert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ftbert.checkpoint import POOLED
from ftbert.converters import open_checkpoint, rows_of
from ftbert.devices import check_device
from ftbert.dtypes import parse_dtype
from ftbert.keywords import keywords
from ftbert.live_check import encoder_of
from ftbert.optimization.patched_forward import PatchedForward, Settings, compute_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


@keywords()
def optimize(
    model: T, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None, attention: str = "auto"
) -> T:
    """Lets ftbert compute the encoder of a HuggingFace model, in place, and returns the same object.

    model: an encoder of transformers, bare or under any head, one beside a decoder or a model for images; a
    SentenceTransformer, CrossEncoder or GLiNER; a `pipeline`; any torch module or object with `.model` that contains
    such models. It must be in eval mode. Heads and poolers stay as they are. Optimizing again changes the settings, or
    nothing.

    device: where the model is moved first; None leaves it. dtype: what the encoder computes in (fp32, fp16, bf16, fp8,
    int8, q8_0, as in `ftbert.load`); None is the model's own, and fp32 on a CPU. Results come in the model's own dtype
    either way. fp8 and int8 are made by calibration, which takes seconds, also whenever the weights have changed; they
    need the tokenizer that `model` has, or that of the folder or hub id it was loaded from. attention: as in
    `ftbert.load`.

    What differs from the original: at padding the hidden states are 0, and no gradient flows into the encoder (outputs
    are detached from it, also in grad mode; training mode raises RuntimeError). With padding in column 0 the
    pooler_output of a bare encoder is that of each row's first kept token, with a warning the first time.

    Texts in one row, [1, tokens], are computed without padding: cu_seq_lens_q, cu_seq_lens_k, max_length_q and
    max_length_k (int), position_ids that start anew in each text, and no mask, as sentence-transformers gives them to
    flash attention (`unpad_inputs`). They are kept apart whatever attention the model was loaded with; where
    transformers would not, a warning says so the first time. Offsets and positions are compared with the ids before
    they are used; on a GPU the call waits for them once, as it does for a mask.

    Calls that ask for what ftbert does not compute run the original forward, with a warning the first time:
    output_attentions, inputs_embeds, masks that are not [batch, seq], padding in column 0 where a head or another
    module may read it, or in the column that a pooled output is of (SigLIP's last), position_ids other than the
    default, offsets that do not fit, a cache of keys and values (past_key_values, use_cache=True; without these a
    decoder's result has none, whatever its config says). So do all calls while a module inside the encoder has
    forward hooks, under a transform of torch.func, with meta or fake tensors, and those with a mask, positions or
    offsets while the caller records a CUDA graph (warm up `encoder.forward.original` for them). The counts are in
    `encoder.forward.fallbacks`. torch.jit.trace, torch.export, torch.onnx.export and torch.compile(fullgraph=True)
    raise an error that says to call `undo` first; torch.compile without it breaks its graph around the encoder.
    Replicas of torch.nn.DataParallel on other GPUs raise it likewise.

    Weights may be changed, moved or cast afterwards: the next call builds the encoder again (writes through
    `parameter.data` are not noticed), or runs the original where ftbert does not compute them (float64, say). Memory:
    the layers' weights are held twice on a CPU; on a GPU in the model's own dtype only those of query, key and value;
    state_dict, save_pretrained, copy and pickle work as before.

    TypeError: no transformers model in `model`. ValueError: an architecture that is not supported (the supported ones
    are listed), weights that do not fit the config, training mode, a forward that something else has replaced.
    RuntimeError: no such device here, or the model's own result is another than ftbert's.
    """
    encoders = _find_encoders(model)
    settings = Settings(None if dtype is None else parse_dtype(dtype), attention)
    place = None if device is None else check_device(device)
    for encoder in encoders:
        _check(encoder, place, settings)
    if place is not None:
        _move(model, place)
    fresh = [
        (encoder, PatchedForward(encoder, settings, reader, _tokenizer_of(model)))
        for encoder, reader in encoders.items()
        if getattr(encoder.__dict__.get("forward"), "settings", None) != settings
    ]
    for _, forward in fresh:
        forward.built()
    # Only now: what fails above leaves every encoder as it was.
    for encoder, forward in fresh:
        encoder.__dict__["forward"] = forward
    return model


def undo(model: T) -> T:
    """Gives `model`, in place, its own computation back, and frees what `optimize` held. It stays where it is."""
    for encoder in _find_encoders(model):
        if isinstance(encoder.__dict__.get("forward"), PatchedForward):
            del encoder.__dict__["forward"]
    return model


def _find_encoders(model: object) -> dict[PreTrainedModel, str]:
    """The encoders under the topmost transformers models in `model`, and who reads column 0 (see PatchedForward)."""
    from transformers import PreTrainedModel

    root = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(root, nn.Module):
        raise TypeError(
            "expected a transformers model or pipeline, a SentenceTransformer or a CrossEncoder; "
            f"got {type(model).__name__}"
        )
    found: dict[PreTrainedModel, str] = {}
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, PreTrainedModel):
            found[encoder_of(part)] = _first_column(part, root)
        else:
            waiting += part.children()
    if not found:
        raise TypeError(f"there is no transformers model in this {type(root).__name__}")
    return found


def _tokenizer_of(model: object) -> Any:
    """That of a SentenceTransformer, a CrossEncoder or a pipeline; None where there is none that can be saved."""
    found = getattr(model, "tokenizer", None)
    return found if hasattr(found, "save_pretrained") else None


def _first_column(part: PreTrainedModel, root: nn.Module) -> str:
    if encoder_of(part) is part:
        # sentence-transformers' poolings go by the mask. Other modules around an encoder may read anything.
        known = part is root or type(root).__module__.startswith("sentence_transformers.")
        pooled = "pooled" if part is root and getattr(part, "pooler", None) is not None else "unread"
        return pooled if known else "read"
    theirs = encoder_of(part).config  # of a model with two towers that of the text
    rows, config = rows_of(str(theirs.model_type)), theirs.to_dict()
    rows = [row for row in rows if type(part).__name__.endswith(row.architecture)]
    if any(row.task == POOLED for row in rows):
        return "unread"  # but by the encoder's own pooled output
    sources = {row.reads(config) for row in rows}
    if sources == {"last"}:
        return "last"
    return "unread" if sources and sources <= {"tokens", "mean", "late"} else "read"


def _check(encoder: PreTrainedModel, place: torch.device | None, settings: Settings) -> None:
    name = type(encoder).__name__
    if encoder.training:
        raise ValueError(f"{name} is in training mode, and ftbert is for inference; call model.eval() first")
    forward = encoder.__dict__.get("forward")
    if forward is not None and not isinstance(forward, PatchedForward):
        raise ValueError(f"something else has replaced {name}.forward (hooks of accelerate?); undo that first")
    open_checkpoint(encoder)
    compute_dtype(settings.dtype, encoder.dtype, place or check_device(encoder.device))


def _move(model: Any, place: torch.device) -> None:
    if isinstance(model, nn.Module):
        model.to(place)
        return
    model.model.to(place)
    if isinstance(getattr(model, "device", None), torch.device):
        model.device = place  # a pipeline moves its inputs there
