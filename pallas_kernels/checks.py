"""Argument checks shared by the operators' `api` modules."""

import re
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.numerics import COMPUTE_DTYPES


def wrong(op: str, what: str, got: object, expected: object, remedy: str) -> str:
    """Return the one form of an error message about an argument."""
    return f"{op}: {what} is wrong: got {got}; expected {expected}; {remedy}"


def bind_dims(op: str, /, **arrays: Array | jax.ShapeDtypeStruct) -> dict[str, int]:
    """Check that arrays agree on the dims spelled by the suffix of their keyword.

    A suffix is a run of dims: a capital letter with an optional small one, or a digit that is a
    literal size. `bind_dims("f", q_TNDk=q, w_ZE2FL=w)` returns `{"T": .., "N": .., "Dk": .., ..}`.

    Raises:
      ValueError: an array has another rank, or a dim another size than elsewhere.
    """
    bound: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, array in arrays.items():
        dims = re.findall(r"[A-Z][a-z]?|\d", name.rpartition("_")[2])
        if len(dims) != len(array.shape):
            expected = f"the {len(dims)} dims [{', '.join(dims)}]"
            raise ValueError(wrong(op, f"rank of {name}", array.shape, expected, "reshape it"))
        for dim, size in zip(dims, array.shape, strict=True):
            source = owner.setdefault(dim, name)
            if size != (int(dim) if dim.isdigit() else bound.setdefault(dim, size)):
                expected = (
                    f"{dim}={bound[dim]} as in {source}" if dim in bound else f"a {dim} there"
                )
                got = f"{array.shape}, {dim}={size}"
                raise ValueError(wrong(op, f"shape of {name}", got, expected, "make them agree"))
    return bound


def check_row_offsets(op: str, row_offsets: Array, num_rows: int) -> None:
    """Raise ValueError unless `row_offsets` is int32[num_rows + 1]."""
    if row_offsets.shape != (num_rows + 1,) or row_offsets.dtype != jnp.int32:
        got = f"{row_offsets.dtype}{list(row_offsets.shape)}"
        expected = f"int32[{num_rows + 1}]"
        raise ValueError(
            wrong(op, "row_offsets", got, expected, "pass one more than there are rows")
        )


def check_export_tokens(op: str, export_tokens: Array, num_rows: int) -> None:
    """Raise ValueError unless `export_tokens` is int32[num_rows]."""
    if export_tokens.shape != (num_rows,) or export_tokens.dtype != jnp.int32:
        got = f"{export_tokens.dtype}{list(export_tokens.shape)}"
        expected = f"int32[{num_rows}]"
        raise ValueError(wrong(op, "export_tokens", got, expected, "pass one number a row"))


def check_dtypes(op: str, allowed: Collection[DTypeLike], /, **arrays: Array) -> None:
    """Raise TypeError unless every array has one of the allowed dtypes."""
    for name, array in arrays.items():
        if array.dtype not in [jnp.dtype(choice) for choice in allowed]:
            expected = " or ".join(str(jnp.dtype(choice)) for choice in allowed)
            raise TypeError(
                wrong(op, f"dtype of {name}", array.dtype, expected, "convert it first")
            )


def check_activations(op: str, /, **arrays: Array) -> None:
    """Raise TypeError unless all arrays share one compute dtype, float32 or bfloat16."""
    check_dtypes(op, COMPUTE_DTYPES, **arrays)
    check_dtypes(op, [next(iter(arrays.values())).dtype], **arrays)
