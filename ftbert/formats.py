"""How matrices are stored: the core's table (csrc/core/format.h), read from the library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch

from ftbert._library import load_library
from ftbert.dtypes import MATRIX_DTYPES, NUMBERS, Dtype


@dataclass(frozen=True)
class Format:
    """A row of the table; its members are those of the core's `Format`, but for the sizes that GPUs ask for. other: the
    name of that in which the other operand of a product is stored, "" for the residual stream's type."""

    name: str
    numbers: torch.dtype
    bits: int
    block: int
    scales: torch.dtype
    minima: bool
    inside: bool
    in_checkpoints: bool
    other: str
    rows_of: int
    columns_of: int
    least_columns: int
    most_columns: int
    cpu: bool
    first_gpu: int

    def why_not(self, shape: list[int]) -> str:
        """Why no product multiplies by a matrix of this shape, or ""."""
        rows, columns = shape
        if rows % self.rows_of or columns % self.columns_of:
            both, of = self.rows_of == self.columns_of, f"multiples of {self.rows_of}"
            wanted = f"both {of}" if both else f"{of} and {self.columns_of}"
            return f"{rows} rows and {columns} columns are not {wanted}"
        if columns < self.least_columns:
            return f"{columns} columns are fewer than {self.least_columns}"
        return f"{columns} columns are more than {self.most_columns}" if columns > self.most_columns else ""

    @property
    def capabilities(self) -> str:
        """Of the GPUs that have such products: "8.0 or above"."""
        major, minor = divmod(self.first_gpu, 10)
        return f"{major}.{minor} or above"


@cache
def formats() -> dict[str, Format]:
    """The table, by name. ImportError as of `load_library`."""
    load_library()
    rows = (json.loads(row) for row in torch.ops.ftbert.table("formats").values())
    return {row["name"]: Format(**row | {key: NUMBERS[row[key]] for key in ("numbers", "scales")}) for row in rows}


def format_of(dtype: Dtype) -> Format:
    """Of the matrices of a model that is loaded in `dtype`."""
    return next(formats()[name] for name, one in MATRIX_DTYPES.items() if one == dtype)


def numbers_of(name: str) -> torch.dtype | None:
    """The type of the tensor with the numbers of a matrix in this format; None for "", the model's own type."""
    return formats()[name].numbers if name else None
