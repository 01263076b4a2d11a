"""Public short convolution: checks and dispatch.

    y_t = SiLU( sum_{j<X} weight[:, j] * x_{t-(X-1)+j} )

where x before a row's first token comes from its history. Accumulation is float32. The history
holds the last X-1 inputs as they were before the convolution, oldest first.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.checks import (
    bind_dims,
    check_activations,
    check_dtypes,
    check_export_tokens,
    check_row_offsets,
    wrong,
)
from pallas_kernels.dispatch import Op, run
from pallas_kernels.short_conv import reference, xla

SHORT_CONV = Op(
    name="short_conv", implementations={"reference": reference.short_conv, "xla": xla.short_conv}
)
SHORT_CONV_STEP = Op(
    name="short_conv_step",
    implementations={"reference": reference.short_conv_step, "xla": xla.short_conv_step},
)


def short_conv(
    x_TK: Float[Array, "T K"],
    weight_KX: Float32[Array, "K X"],
    history_SXhK: Float[Array, "S Xh K"],
    row_offsets: Int32[Array, " S1"],
    export_tokens_S: Int32[Array, " S"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T K"], Float[Array, "S Xh K"], Float[Array, "S Xh K"]]:
    """Convolve ragged rows of tokens.

    Args:
      x_TK: inputs of K channels, float32 or bfloat16.
      weight_KX: taps, oldest to newest, float32.
      history_SXhK: the X-1 inputs before each row, dtype of `x_TK`; zeros for a row that starts
        cold.
      row_offsets: see `pallas_kernels.ragged`.
      export_tokens_S: tokens of each row after which its history is returned as well; at most the
        row's length.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      Outputs in the dtype of `x_TK`, zero for padding tokens; the history after each row; and the
      history after the first `export_tokens_S` tokens of each row. Fewer than X-1 tokens leave the
      newest part of the old history in place (KF-K07), no token leaves all of it.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree.
    """
    dims = _check("short_conv", weight_KX, history_SXhK, x_TK=x_TK)
    check_row_offsets("short_conv", row_offsets, dims["S"])
    check_export_tokens("short_conv", export_tokens_S, dims["S"])
    return run(
        SHORT_CONV, implementation, x_TK, weight_KX, history_SXhK, row_offsets, export_tokens_S
    )


def short_conv_step(
    x_SK: Float[Array, "S K"],
    weight_KX: Float32[Array, "K X"],
    history_SXhK: Float[Array, "S Xh K"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "S K"], Float[Array, "S Xh K"]]:
    """Convolve one token of every row: `short_conv` with S rows of length 1."""
    _check("short_conv_step", weight_KX, history_SXhK, x_SK=x_SK)
    return run(SHORT_CONV_STEP, implementation, x_SK, weight_KX, history_SXhK)


def _check(op: str, weight_KX: Array, history_SXhK: Array, **x: Array) -> dict[str, int]:
    dims = bind_dims(op, **x, weight_KX=weight_KX, history_SXhK=history_SXhK)
    if dims["Xh"] != dims["X"] - 1:
        expected = f"{dims['X'] - 1} for {dims['X']} taps"
        raise ValueError(wrong(op, "history length", dims["Xh"], expected, "pass X-1 inputs"))
    check_dtypes(op, [jnp.float32], weight_KX=weight_KX)
    check_activations(op, **x, history_SXhK=history_SXhK)
    return dims
