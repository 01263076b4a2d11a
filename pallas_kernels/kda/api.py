"""Public KDA operators: checks and dispatch.

Per head, with S of shape [Dv, Dk] and everything in float32:

    q = l2(q) * Dk**-0.5,   k = l2(k),   l2(x) = x * rsqrt(sum x^2 + 1e-6),   beta = sigmoid(b)
    S  <- S diag(exp(g_t))                 decay, key channels
    u   = beta_t (v_t - S k_t)             read with the decayed state
    S  <- S + u k_t^T                      write
    o_t = S q_t                            read with the updated state

The state is V-major, [S, N, Dv, Dk], float32 (KF-K08).
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
from pallas_kernels.kda import mosaic_prefill, reference, xla

KDA_PREFILL = Op(
    name="kda_prefill",
    implementations={
        "reference": reference.kda_prefill,
        "xla": xla.kda_prefill,
        "mosaic": mosaic_prefill.kda_prefill,
    },
)
KDA_DECODE = Op(
    name="kda_decode", implementations={"reference": reference.kda_decode, "xla": xla.kda_decode}
)


def kda_prefill(
    q_TNDk: Float[Array, "T N Dk"],
    k_TNDk: Float[Array, "T N Dk"],
    v_TNDv: Float[Array, "T N Dv"],
    f_TNDk: Float[Array, "T N Dk"],
    b_TN: Float[Array, "T N"],
    A_log_N: Float32[Array, " N"],
    dt_bias_NDk: Float32[Array, "N Dk"],
    state_SNDvDk: Float32[Array, "S N Dv Dk"],
    row_offsets: Int32[Array, " S1"],
    export_tokens_S: Int32[Array, " S"],
    *,
    lower_bound: float | None,
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N Dv"], Float32[Array, "S N Dv Dk"], Float32[Array, "S N Dv Dk"]]:
    """Run the recurrence over ragged rows of tokens.

    Args:
      q_TNDk, k_TNDk, v_TNDv: queries, keys, values after the convolution, not yet normalised; one
        compute dtype.
      f_TNDk: gate input before `dt_bias`; see `kda_gate`.
      b_TN: write strength before the sigmoid.
      A_log_N, dt_bias_NDk: gate parameters.
      state_SNDvDk: state before each row; zeros for a row that starts cold.
      row_offsets: see `pallas_kernels.ragged`.
      export_tokens_S: tokens of each row after which its state is returned as well: a multiple of
        `chunk` and less than the row's length, or 0.
      lower_bound: least log decay of the bounded gate, negative; None selects the softplus gate.
      chunk: tokens a chunk, counted from each row's start; a power of two.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      Outputs in the compute dtype, zero for padding tokens; the state after each row, an empty row
      keeps its state; and the state after the first `export_tokens_S` tokens of each row.

    Raises:
      ValueError, TypeError: shapes, dtypes, `lower_bound` or `chunk` are not as above.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(wrong("kda_prefill", "chunk", chunk, "a power of two", "use 64"))
    arrays = {"q_TNDk": q_TNDk, "k_TNDk": k_TNDk, "v_TNDv": v_TNDv, "f_TNDk": f_TNDk, "b_TN": b_TN}
    dims = _check("kda_prefill", arrays, A_log_N, dt_bias_NDk, state_SNDvDk, lower_bound)
    check_row_offsets("kda_prefill", row_offsets, dims["S"])
    check_export_tokens("kda_prefill", export_tokens_S, dims["S"])
    return run(
        KDA_PREFILL,
        implementation,
        *arrays.values(),
        A_log_N,
        dt_bias_NDk,
        state_SNDvDk,
        row_offsets,
        export_tokens_S,
        lower_bound=lower_bound,
        chunk=chunk,
    )


def kda_decode(
    q_SNDk: Float[Array, "S N Dk"],
    k_SNDk: Float[Array, "S N Dk"],
    v_SNDv: Float[Array, "S N Dv"],
    f_SNDk: Float[Array, "S N Dk"],
    b_SN: Float[Array, "S N"],
    A_log_N: Float32[Array, " N"],
    dt_bias_NDk: Float32[Array, "N Dk"],
    state_SNDvDk: Float32[Array, "S N Dv Dk"],
    *,
    lower_bound: float | None,
    implementation: str | None = None,
) -> tuple[Float[Array, "S N Dv"], Float32[Array, "S N Dv Dk"]]:
    """Run one token of every row: `kda_prefill` with S rows of length 1."""
    arrays = {"q_SNDk": q_SNDk, "k_SNDk": k_SNDk, "v_SNDv": v_SNDv, "f_SNDk": f_SNDk, "b_SN": b_SN}
    _check("kda_decode", arrays, A_log_N, dt_bias_NDk, state_SNDvDk, lower_bound)
    return run(
        KDA_DECODE,
        implementation,
        *arrays.values(),
        A_log_N,
        dt_bias_NDk,
        state_SNDvDk,
        lower_bound=lower_bound,
    )


def _check(
    op: str,
    activations: dict[str, Array],
    A_log_N: Array,
    dt_bias_NDk: Array,
    state_SNDvDk: Array,
    lower_bound: float | None,
) -> dict[str, int]:
    parameters = {"A_log_N": A_log_N, "dt_bias_NDk": dt_bias_NDk, "state_SNDvDk": state_SNDvDk}
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            wrong(
                op, "lower_bound", lower_bound, "a negative number", "pass None for softplus gates"
            )
        )
    check_activations(op, **activations)
    check_dtypes(op, [jnp.float32], **parameters)
    return bind_dims(op, **activations, **parameters)
