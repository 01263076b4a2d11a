"""What the operator tests share: golden files, error measure, implementation names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.dispatch import Op

GOLDEN = Path(__file__).parent.parent / "data" / "ops"
RAGGED_LENGTHS = (0, 1, 3, 63, 64, 65, 130)

# Limits on `relative_error`.
F32, CHUNKED_F32, BF16 = 1e-5, 2e-5, 1e-2


def golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one golden file."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def each_implementation(op: Op) -> pytest.MarkDecorator:
    """Run a test once for every implementation of an operator that takes any device and shape."""
    portable = sorted({"reference", "xla"} & set(op.implementations))
    return pytest.mark.parametrize("implementation", portable)


def relative_error(got: jax.Array | np.ndarray, want: jax.Array | np.ndarray) -> float:
    """Return max |got - want| / max |want|; infinite when a number is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    if not np.isfinite(got).all():
        return np.inf
    return float(np.abs(got - want).max() / np.abs(want).max())


def offsets(lengths: tuple[int, ...]) -> jax.Array:
    """Return the row offsets of rows of these lengths."""
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


@contextlib.contextmanager
def unchecked_annotations() -> Iterator[None]:
    """Switch the annotation checks of the test set-up off, to see the operators' own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
