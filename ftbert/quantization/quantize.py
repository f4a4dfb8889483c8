"""A checkpoint whose matrices of the layers are E4M3, from one that is not and from texts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftbert.checkpoint import Checkpoint, EncoderConfig
from ftbert.converters import build_reference, check_target, open_checkpoint, source_modules, write_folder
from ftbert.padded_batches import padded
from ftbert.quantization.e4m3 import best_scale, quantize_rows
from ftbert.quantization.observe import Observed, observe
from ftbert.text import TextSettings, Tokenizer

MOST_TEXTS = 512
FEWEST_TOKENS = 256
_MULTIPLE = 16  # of rows and columns of a matrix whose products run in E4M3
_BATCH, _LONGEST = 16, 512  # texts, tokens


@dataclass(frozen=True)
class QuantizeResult:
    """matrices: those in E4M3. kept: those of the layers that are not, with the reason."""

    target: str
    dtype: str
    matrices: int
    kept: dict[str, str]
    texts: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"kept as they are: {name} ({why})" for name, why in self.kept.items()]
        read = f"calibrated on {self.texts} texts of {self.tokens} tokens"
        lines.append(f"wrote {self.target}: {self.matrices} matrices in {self.dtype}, {read}")
        return "\n".join(lines)


def calibration_texts() -> list[str]:
    """Those that come with the package: of many kinds and some languages, words to paragraphs."""
    return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8").splitlines()


def quantize(
    source: str | Path | torch.nn.Module,
    target: str | Path,
    texts: Sequence[str] | None = None,
    *,
    keep: Sequence[str] = (),
    force: bool = False,
    revision: str | None = None,
) -> QuantizeResult:
    """Writes `target`, a folder as of `convert` whose matrices of the layers are E4M3: a scale for each row, and one
    for what the matrix multiplies, which transformers' model in float32 shows on the first 512 texts, 512 tokens of
    each.

    texts: None for those that come with the package. keep: names, or beginnings of names, of matrices that stay as they
    are: "layers.0", "layers.3.ffn.down". ValueError: texts of fewer than 256 tokens, a name in `keep` that is none, a
    matrix or an input that is not finite, a model that is quantized already or has no tokenizer; besides what `convert`
    raises.
    """
    target = Path(target)
    check_target(target, source, force)
    checkpoint = open_checkpoint(source, revision=revision)
    if checkpoint.config.left_out:
        warnings.warn(f"{checkpoint.source.where}: {checkpoint.config.left_out}", stacklevel=2)
    wanted, kept = _choose(checkpoint, keep)
    rows = _ids(checkpoint, calibration_texts() if texts is None else texts)
    seen = _observe(checkpoint, wanted, rows)
    tensors = _quantized(checkpoint, seen)
    config = replace(checkpoint.config, encoder=_stored(checkpoint.config.encoder, wanted))
    write_folder(replace(checkpoint, config=config), tensors, source, target, force)
    return QuantizeResult(str(target), "e4m3", len(wanted), kept, len(rows), sum(map(len, rows)))


def _choose(checkpoint: Checkpoint, keep: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """By matrix the module of transformers that shows what it multiplies; of the others why they are none of them."""
    encoder = checkpoint.config.encoder
    if any(spec.stored for spec in encoder.weight_specs()):
        raise ValueError(f"{checkpoint.source.where}: is quantized already; quantize the model that it was made from")
    modules, shapes = source_modules(checkpoint.config), encoder.weight_shapes()
    kept = {name: "asked for" for name in modules if any(f"{name}.".startswith(f"{one}.") for one in keep)}
    for one in keep:
        if not any(f"{name}.".startswith(f"{one}.") for name in kept):
            like = next(iter(modules), "")
            raise ValueError(f"keep: {one!r} is no matrix of the layers; expected a name like {like}")
    for name in modules.keys() - kept.keys():
        rows, columns = shapes[name]
        if rows % _MULTIPLE or columns % _MULTIPLE:
            kept[name] = f"{rows} rows and {columns} columns are not both multiples of {_MULTIPLE}"
    wanted = {name: sources[0] for name, sources in modules.items() if name not in kept}
    if not wanted:
        raise ValueError(f"{checkpoint.source.where}: no matrix is left that could be stored in e4m3")
    return wanted, kept


def _ids(checkpoint: Checkpoint, texts: Sequence[str]) -> list[Tensor]:
    if checkpoint.folder is None:
        raise ValueError(f"{checkpoint.source.where}: calibration needs a tokenizer, so a folder or a hub id")
    settings = TextSettings.from_folder(checkpoint.folder)
    tokenizer = Tokenizer(checkpoint.folder, settings, checkpoint.config.encoder.max_seq)
    longest = min(_LONGEST, tokenizer.max_length)
    rows = tokenizer.encode_batch(list(texts)[:MOST_TEXTS], settings.default_prompt, longest)
    tokens = sum(map(len, rows))
    if tokens < FEWEST_TOKENS:
        raise ValueError(
            f"texts: {len(rows)} with {tokens} tokens are too few to calibrate on; give at least {FEWEST_TOKENS} "
            "tokens, of the kind that the model is for"
        )
    return [torch.from_numpy(row) for row in rows if len(row)]


def _observe(checkpoint: Checkpoint, wanted: dict[str, str], rows: list[Tensor]) -> dict[str, Observed]:
    for name in wanted:
        if not checkpoint.read(name).isfinite().all():
            raise ValueError(f"{checkpoint.source.where}: {name} holds numbers that are not finite")
    reference = build_reference(checkpoint, with_heads=False)
    pad = getattr(reference.config, "pad_token_id", None) or 0
    batches = []
    ordered = sorted(rows, key=len)
    for start in range(0, len(ordered), _BATCH):
        batches.append(padded(ordered[start : start + _BATCH], "right", pad, torch.device("cpu")))
    return observe(reference, wanted, batches)


def _quantized(checkpoint: Checkpoint, seen: dict[str, Observed]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new checkpoint; what is not quantized in the type in which it was stored."""
    for name in checkpoint.tensors:
        if name not in seen:
            yield name, checkpoint.read(name, checkpoint.stored_dtype)
            continue
        stored, scale = quantize_rows(checkpoint.read(name), seen[name].gram)
        yield name, stored
        yield f"{name}.scale", scale
        found = best_scale(seen[name].sample, seen[name].largest)
        yield f"{name.removesuffix('.weight')}.input.scale", torch.tensor([found])


def _stored(encoder: EncoderConfig, matrices: Sequence[str] | dict[str, str]) -> EncoderConfig:
    """With the types of these matrices."""
    layers = []
    for layer in encoder.layers:
        ours = {tuple(name.split(".")[2:4]) for name in matrices if name.split(".")[1] == str(layer.weights_of)}
        attention: dict[str, Any] = {f"{part}_type": "e4m3" for block, part in ours if block == "attention"}
        ffn: dict[str, Any] = {f"{part}_type": "e4m3" for block, part in ours if block == "ffn"}
        changed: dict[str, Any] = {"attention": replace(layer.attention, **attention), "ffn": replace(layer.ffn, **ffn)}
        layers.append(replace(layer, **changed))
    return replace(encoder, layers=tuple(layers))
