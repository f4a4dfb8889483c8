"""Which tensors of a checkpoint may stay behind, and the sentence on them.

- What the family's table asks for must be there in its shape. Nothing is made up.
- Buffers (position_ids) and the parts of known heads that this model does not have: left out without a word, since
  transformers makes them or leaves them out as well.
- A head that ftbert does not know, and all else outside the encoder (fit_denses of a distillation, the projection of
  ColBERT, a CRF, a loss's tables): left out with one warning, as transformers does. The encoder does not read them.
- Inside the encoder nothing may be left over: one layer more than the config says, an adapter, a scale or a table of
  positions there means that the checkpoint computes something else.
"""

from __future__ import annotations

from ftbert.checkpoint import Shape
from ftbert.converters.family import Family, sources_of
from ftbert.converters.head_tables import PREFIXES, HeadRow, rows_of

_MOST = 4  # names shown


def silent(family: Family, found: dict[str, Shape]) -> set[str]:
    """Buffers, and everything that has the name of a head."""
    own = {row.dense.partition(".")[0] + "." for row in rows_of(family.name) if row.dense}
    return {name for name in found if name.startswith((*PREFIXES, *own)) or name.endswith(family.buffers)}


def outside(family: Family, prefix: str, found: dict[str, Shape]) -> set[str]:
    """Names of tensors that are none of the encoder's. prefix: what stands before the encoder's names in `found`."""
    modules = {name.partition(".")[0] for row in family.names.values() for name in sources_of(row)}
    beside = tuple(before + name for before in family.prefixes for name in family.beside)

    def inside(name: str) -> bool:
        begins = name.startswith(family.bases) or (not prefix and name.partition(".")[0] in modules)
        return begins and not name.startswith(beside)

    return {name for name in found if not inside(name)} - silent(family, found)


def left_out(rows: list[HeadRow], architecture: str, found: dict[str, Shape], others: set[str]) -> str:
    """A sentence on the tensors of a head of which `rows` has nothing and on `others`, "" where there are none."""
    said = []
    heads = [name for name in found if name.startswith(PREFIXES) and not name.startswith("dropout.")]
    if heads and not rows:
        reason = f"it is none that ftbert knows for {architecture}" if architecture else "its config names no class"
        said.append(f"the task head is left out ({_some(heads)}): {reason}")
    if rest := [name for name in found if name in others]:
        said.append(f"what stands outside the encoder is left out ({_some(rest)}): ftbert computes nothing with it")
    return "; ".join(said)


def _some(names: list[str]) -> str:
    """One of each module, first."""
    of_modules = {name.partition(".")[0]: name for name in reversed(names)}.values()
    names = sorted(names, key=lambda name: name not in of_modules)
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
