"""Verification in XLA: all tokens at once, but for the recurrence.

Gates and norms do not depend on the state, and are done for the tokens of all slots together. So
a token costs little more than its pass over the states, however slow launches are.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.kda.composed import gated_norm
from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.kda.pages import read_states
from pallas_kernels.kda.records import KdaRecords
from pallas_kernels.kda.xla import normalise
from pallas_kernels.numerics import contract, round_to, sigmoid_f32
from pallas_kernels.short_conv import short_conv_step


def kda_verify_paged(
    qkv_SX3ND: Float[Array, "S X 3 N D"],
    f_SXND: Float[Array, "S X N D"],
    b_SXN: Float[Array, "S X N"],
    gate_SXND: Float[Array, "S X N D"],
    taps_3NDK: Float32[Array, "3 N D K"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    o_norm_D: Float32[Array, " D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    lengths_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "S X N D"], KdaRecords]:
    """See `verify.kda_verify_paged`."""
    num_rows, num_slots, _, heads, dim = qkv_SX3ND.shape
    weights = taps_3NDK.reshape(-1, taps_3NDK.shape[-1])
    kept = weights.shape[1] - 1
    window, state, _ = read_states(
        pool_ZPWE, source_S, (kept, 3, heads, dim), qkv_SX3ND.dtype, position=position
    )

    def flat(x: Array) -> Array:  # [S, X, ...] -> [S X, ...]
        return x.reshape(num_rows * num_slots, *x.shape[2:])

    def slots(x: Array) -> Array:
        return x.reshape(num_rows, num_slots, *x.shape[1:])

    with jax.named_scope("conv"):
        history, mixed = window.reshape(num_rows, kept, -1), []
        for x in range(num_slots):  # the order of decode's sums
            token = qkv_SX3ND[:, x].reshape(num_rows, -1)
            token, history = short_conv_step(token, weights, history, implementation="xla")
            mixed.append(token)
        q, k, v = jnp.unstack(jnp.stack(mixed, axis=1).reshape(qkv_SX3ND.shape), axis=2)
    with jax.named_scope("delta"):
        q_f32, k_f32, v_f32 = normalise(q) * dim**-0.5, normalise(k), v.astype(jnp.float32)
        decay = slots(jnp.exp(kda_gate(flat(f_SXND), A_log_N, dt_bias_ND, lower_bound)))
        beta = sigmoid_f32(b_SXN)[..., None]
        us, outputs = [], []
        for x in range(num_slots):
            state = state * decay[:, x, :, None]
            seen = contract("snvk,snk->snv", state, k_f32[:, x])
            us.append(beta[:, x] * (v_f32[:, x] - seen))
            state = state + us[-1][..., None] * k_f32[:, x, :, None]
            outputs.append(contract("snvk,snk->snv", state, q_f32[:, x]))
        o = round_to(jnp.stack(outputs, axis=1), q.dtype)
    with jax.named_scope("output"):
        y = slots(gated_norm(flat(o), flat(gate_SXND), o_norm_D, eps))
        is_used = jnp.arange(num_slots)[None] < lengths_S[:, None]
        y = jnp.where(is_used[..., None, None], y, jnp.zeros_like(y))
    return y, KdaRecords(u_SXND=jnp.stack(us, axis=1), k_SXND=k)
