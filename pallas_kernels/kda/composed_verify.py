"""Verification composed of the one-token operators, a token after the other; the plain commit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.kda.api import kda_decode
from pallas_kernels.kda.composed import gated_norm
from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.kda.pages import read_states, write_states
from pallas_kernels.kda.records import KdaRecords
from pallas_kernels.kda.xla import normalise
from pallas_kernels.numerics import contract, sigmoid_f32
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
    window = window.reshape(num_rows, kept, -1)
    outputs, us, ks = [], [], []
    for x in range(num_slots):
        with jax.named_scope("conv"):
            qkv, window = short_conv_step(
                qkv_SX3ND[:, x].reshape(num_rows, -1), weights, window, implementation="reference"
            )
            q, k, v = jnp.unstack(qkv.reshape(num_rows, 3, heads, dim), axis=1)
        with jax.named_scope("delta"):
            decay = jnp.exp(kda_gate(f_SXND[:, x], A_log_N, dt_bias_ND, lower_bound))
            seen = contract("snvk,snk->snv", state * decay[:, :, None], normalise(k))
            us.append(sigmoid_f32(b_SXN[:, x])[..., None] * (v.astype(jnp.float32) - seen))
            ks.append(k)
            o, state = kda_decode(
                q, k, v, f_SXND[:, x], b_SXN[:, x], A_log_N, dt_bias_ND, state,
                lower_bound=lower_bound, implementation="reference",
            )  # fmt: skip
        with jax.named_scope("output"):
            y = gated_norm(o, gate_SXND[:, x], o_norm_D, eps)
            outputs.append(jnp.where((x < lengths_S)[:, None, None], y, jnp.zeros_like(y)))
    u_SXND, k_SXND = jnp.stack(us, axis=1), jnp.stack(ks, axis=1)
    return jnp.stack(outputs, axis=1), KdaRecords(u_SXND=u_SXND, k_SXND=k_SXND)


def kda_commit_paged(
    records: KdaRecords,
    qkv_SX3ND: Float[Array, "S X 3 N D"],
    f_SXND: Float[Array, "S X N D"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    accepted_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    taps: int,
) -> UInt16[Array, "Z P W E"]:
    """See `verify.kda_commit_paged`."""
    num_rows, num_slots, _, heads, dim = qkv_SX3ND.shape
    kept = taps - 1
    window, state, pool_ZPWE = read_states(
        pool_ZPWE, source_S, (kept, 3, heads, dim), qkv_SX3ND.dtype, position=position
    )
    with jax.named_scope("delta"):
        for x in range(num_slots):
            decay = jnp.exp(kda_gate(f_SXND[:, x], A_log_N, dt_bias_ND, lower_bound))
            k, u = normalise(records.k_SXND[:, x]), records.u_SXND[:, x]
            after = state * decay[:, :, None] + u[..., None] * k[:, :, None]
            state = jnp.where((x < accepted_S)[:, None, None, None], after, state)
    with jax.named_scope("window"):
        seen = jnp.concatenate([window, qkv_SX3ND], axis=1)
        place_SK = accepted_S[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
        window = seen[jnp.arange(num_rows, dtype=jnp.int32)[:, None], place_SK]
    return write_states(pool_ZPWE, target_S, window, state, position=position)
