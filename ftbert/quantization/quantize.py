"""A checkpoint whose matrices of the layers are stored in 8 bits, from one that is not and from texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftbert.caller import warn_caller
from ftbert.checkpoint import WORD_TABLE, Checkpoint, fits_8_bits
from ftbert.converters import (
    build_reference,
    check_target,
    open_checkpoint,
    source_modules,
    source_tensors,
    write_folder,
)  # fmt: skip
from ftbert.devices import check_device
from ftbert.quantization.observe import observe
from ftbert.quantization.select import Measured, Simulation, TooFar, choose
from ftbert.quantization.stored_type import Quantized, QuantizedMatrix, StoredType
from ftbert.quantization.stored_types import stored_type
from ftbert.quantization.vectors import TextVectors
from ftbert.text import TextSettings, Tokenizer

MOST_TEXTS = 512
FEWEST_TOKENS = 256
_LONGEST = 512  # tokens
_UNSEEN = 8  # of so many texts one is not calibrated on, where there are twice as many
_MEASURED = 128  # texts
_WORST = 5  # texts that a result names
_GRAM_BYTES = 2 << 30  # of the sums over inputs that are in memory at once


@dataclass(frozen=True)
class QuantizeResult:
    """matrices: those in `dtype`. kept: those of the layers that are not, with the reason. texts, tokens: all that were
    read, of which calibration leaves out an eighth. mean_cosine, worst_cosine: of texts' simulated vectors with the
    vectors of float32. mean_cosine: the lesser mean, of all `measured` texts or of the texts that calibration left out.
    worst_texts: which ones, the worst first."""

    target: str
    dtype: str
    matrices: int
    kept: dict[str, str]
    texts: int
    tokens: int
    measured: int
    mean_cosine: float
    worst_cosine: float
    worst_texts: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"kept as they are: {name} ({why})" for name, why in self.kept.items()]
        lines.append(
            f"vectors of {self.measured} texts against float32: mean cosine {self.mean_cosine:.5f}, worst "
            f"{self.worst_cosine:.4f} (text {self.worst_texts[0]})"
        )
        read = f"calibrated on {self.texts} texts of {self.tokens} tokens"
        lines.append(f"wrote {self.target}: {self.matrices} matrices in {self.dtype}, {read}")
        return "\n".join(lines)


def calibration_texts() -> list[str]:
    """Those that come with the package: of many kinds and some languages, words to paragraphs."""
    return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8").splitlines()


@torch.inference_mode(False)
def quantize(
    source: str | Path | torch.nn.Module,
    target: str | Path,
    texts: Sequence[str] | None = None,
    *,
    dtype: str | torch.dtype = "fp8",
    keep: Sequence[str] = (),
    any_loss: bool = False,
    force: bool = False,
    revision: str | None = None,
    device: str | torch.device = "cpu",
) -> QuantizeResult:
    """Writes `target`, a folder as of `convert` whose matrices of the layers are stored in 8 bits: with a scale for
    each row, and of what the matrix multiplies in fp8 one scale, in int8 a factor for each column. Those transformers'
    model in float32 shows on the first 512 texts, 512 tokens of each. In int8 the word table is stored so too, unless
    a head multiplies by it.

    The model is then simulated as it was quantized. Where the vectors of texts are too far from those of float32, mean
    cosine below .9973 or the worst below .991 (int8: .9991, .9955), the fewest matrices that suffice stay as they are,
    at most half of the weights.

    texts: None for those that come with the package. dtype: "fp8", for GPUs, or "int8", for GPUs and CPUs. keep: names,
    or beginnings of names, of matrices that stay as they are: "layers.0", "layers.3.ffn.down". any_loss: nothing else
    is kept, however far the vectors are. device: where all of it is computed. ValueError: texts of fewer than 256
    tokens, a name in `keep` that is none, a matrix or an input that is not finite, a model that is quantized already or
    has no tokenizer, or one that stays too far from float32; besides what `convert` raises.
    """
    target, where, kind = Path(target), check_device(device), stored_type(dtype)
    check_target(target, source, force)
    checkpoint = open_checkpoint(source, revision=revision)
    if checkpoint.config.left_out:
        warn_caller(f"{checkpoint.source.where}: {checkpoint.config.left_out}")
    wanted, kept = _choose(checkpoint, kind, keep)
    table = dict[str, Quantized]()
    if kind.store_table and WORD_TABLE not in kept:
        table[WORD_TABLE] = kind.store_table(_finite(checkpoint, WORD_TABLE))
    tokenizer = _tokenizer(checkpoint)
    rows = _ids(tokenizer, calibration_texts() if texts is None else texts)
    numbers = [i for i, row in enumerate(rows) if len(row)]
    unseen = numbers[_UNSEEN - 1 :: _UNSEEN] if len(numbers) >= 2 * _UNSEEN else []
    seen = [i for i in numbers if i not in set(unseen)]
    with _exact_products():
        reference = build_reference(checkpoint, with_heads=False).requires_grad_(False)
        vectors = TextVectors.of(reference.to(where), checkpoint, tokenizer)  # type: ignore[arg-type]
        stored = _quantized(checkpoint, kind, vectors, wanted, [rows[i] for i in seen])
        measured_on = [*unseen, *seen[:: -(-len(seen) // max(1, _MEASURED - len(unseen)))]]
        measured_rows = [rows[i] for i in measured_on]
        exact = vectors(measured_rows)
        tables = {
            theirs: tensor
            for name, one in table.items()
            for theirs, tensor in source_tensors(checkpoint.config, name, one.values(vectors.device)).items()
        }
        simulation = Simulation(vectors, checkpoint.config, stored, measured_rows, len(unseen), exact, tables)
        left_out, measured = _gate(simulation, kind, any_loss, checkpoint.source.where)
    kept |= left_out
    stored = {name: one for name, one in stored.items() if name not in left_out}
    result = QuantizeResult(
        target=str(target), dtype=kind.word, matrices=len(stored), kept=kept, texts=len(numbers),
        tokens=sum(map(len, rows)), measured=len(measured_on), mean_cosine=measured.mean,
        worst_cosine=measured.worst, worst_texts=tuple(measured_on[i] for i in measured.order[:_WORST]),
    )  # fmt: skip
    encoder = checkpoint.config.encoder.stored_as([*stored, *table], kind.word)
    config = replace(checkpoint.config, encoder=encoder, quantized=_told(result))
    write_folder(replace(checkpoint, config=config), _tensors(checkpoint, stored | table), source, target, force)
    return result


def _choose(checkpoint: Checkpoint, kind: StoredType, keep: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """By matrix the module of transformers that shows what it multiplies; of the others why they are none of them."""
    encoder = checkpoint.config.encoder
    if encoder.has_8_bits:
        raise ValueError(f"{checkpoint.source.where}: is quantized already; quantize the model that it was made from")
    modules, shapes = source_modules(checkpoint.config), encoder.weight_shapes()
    names = [*modules, WORD_TABLE] if kind.store_table else [*modules]
    kept = {name: "asked for" for name in names if any(f"{name}.".startswith(f"{one}.") for one in keep)}
    if kind.store_table and any(head.tied for head in checkpoint.config.heads):
        kept.setdefault(WORD_TABLE, "a head multiplies by it")
    for one in keep:
        if not any(f"{name}.".startswith(f"{one}.") for name in kept):
            like = next(iter(modules), "")
            raise ValueError(f"keep: {one!r} is nothing that would be quantized; expected a name like {like}")
    for name in modules.keys() - kept.keys():
        if why := fits_8_bits(kind.word, shapes[name]):
            kept[name] = why
    wanted = {name: sources[0] for name, sources in modules.items() if name not in kept}
    if not wanted:
        raise ValueError(f"{checkpoint.source.where}: no matrix is left that could be stored in {kind.word}")
    return wanted, kept


@contextmanager
def _exact_products() -> Iterator[None]:
    """Products of float32 in float32, whatever the process allows (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def text_folder(checkpoint: Checkpoint) -> Path:
    """Where the tokenizer for calibration is; ValueError without one."""
    where = checkpoint.source.where
    if checkpoint.entities is not None:
        raise ValueError(
            f"{where}: a GLiNER is not quantized by calibration, which reads texts without labels; fp16, bf16 and q8_0 "
            "need none"
        )
    if checkpoint.folder is None:
        raise ValueError(f"{where}: calibration needs a tokenizer, so a folder or a hub id")
    return checkpoint.folder


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    folder = text_folder(checkpoint)
    return Tokenizer(folder, TextSettings.from_folder(folder), checkpoint.config.encoder.max_seq)


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tensor]:
    """Of the texts that are read."""
    longest = min(_LONGEST, tokenizer.max_length)
    rows = tokenizer.encode_batch(list(texts)[:MOST_TEXTS], tokenizer.settings.default_prompt, longest)
    tokens = sum(map(len, rows))
    if tokens < FEWEST_TOKENS:
        raise ValueError(
            f"texts: {len(rows)} with {tokens} tokens are too few to calibrate on; give at least {FEWEST_TOKENS} "
            "tokens, of the kind that the model is for"
        )
    return [torch.from_numpy(row) for row in rows]


def _quantized(
    checkpoint: Checkpoint,
    kind: StoredType,
    vectors: TextVectors,
    wanted: Mapping[str, str],
    rows: Sequence[Tensor],
) -> dict[str, QuantizedMatrix]:
    """The matrices in `wanted`, which names a module of transformers for each. As many passes over the texts as it
    takes to hold no more sums over inputs than _GRAM_BYTES at once."""
    for name in wanted:
        _finite(checkpoint, name)
    batches = [(ids, mask) for _, ids, mask in vectors.batches(rows)]
    shapes, stored, group, held = checkpoint.config.encoder.weight_shapes(), {}, dict[str, str](), 0
    for place, (name, module) in enumerate(wanted.items()):
        group[name] = module
        held += 4 * shapes[name][1] ** 2 * kind.needs_gram
        if held < _GRAM_BYTES and place + 1 < len(wanted):
            continue
        for one, seen in observe(vectors.model, group, batches, kind.needs_gram).items():
            stored[one] = kind.store(checkpoint.read(one).to(vectors.device), seen)
        group, held = {}, 0
    return stored


def _finite(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.read(name)
    if not tensor.isfinite().all():
        raise ValueError(f"{checkpoint.source.where}: {name} holds numbers that are not finite")
    return tensor


def _gate(simulation: Simulation, kind: StoredType, any_loss: bool, where: str) -> tuple[dict[str, str], Measured]:
    """The matrices that stay, with the reason, and what is measured with them."""
    if any_loss:
        return {}, simulation.measure()
    asked = kind.limits.asked
    try:
        left_out, measured, everything = choose(simulation, asked)
    except TooFar as error:
        raise ValueError(
            f"{where}: vectors of texts in {kind.word} are too far from those of float32: {error}; expected are "
            f"{asked.mean} and {asked.worst}. Use {kind.instead}, name more matrices that stay as they are "
            "(keep=, --keep), or take the loss (any_loss=True, --any-loss)"
        ) from None
    return dict.fromkeys(left_out, f"calibration: {everything} with all matrices in {kind.word}"), measured


def _told(result: QuantizeResult) -> dict[str, Any]:
    """What the checkpoint's config says of it."""
    return {name: value for name, value in result.as_dict().items() if name not in ("target", "matrices")}


def _tensors(checkpoint: Checkpoint, stored: Mapping[str, Quantized]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new checkpoint; what is not quantized in the type in which it was stored."""
    for name in checkpoint.tensors:
        if name in stored:
            yield from stored[name].tensors(name).items()
        else:
            yield name, checkpoint.read(name, checkpoint.stored_dtype)
