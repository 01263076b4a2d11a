"""KDA in XLA: chunked prefill and one-token decode.

Inside a chunk, with q and k normalised, g the log decays, D(i, j) the sum of g over the tokens
j+1..i (so exp(D) <= 1), prefix(i) the sum from the chunk's start through i, and suffix(i) the sum
after i:

    A[i, j] = beta_i sum_d k_i exp(D(i, j)) k_j    for j < i
    B[i, j] =        sum_d q_i exp(D(i, j)) k_j    for j <= i
    u  = (I + A)^-1 (beta v)
    w  = (I + A)^-1 (beta exp(prefix) k)
    v' = u - w S^T
    o  = (q exp(prefix)) S^T + B v'
    S <- S diag(exp(total)) + v'^T (k exp(suffix))

The first four do not depend on the state and run in parallel over chunks and heads; one scan over
the chunks does the last three and carries the states. It carries two of each row: the chunks up to
the exported boundary update the first, the chunk behind it goes on from there in the second. So an
export costs no pass over any state, only the room.

Numerics. D is never a difference of two cumulative sums, nor the exponent of a growing factor, so
a gate of any strength stays finite and exact (KF-K01). A chunk is solved by doubling: segments of
1, 2, 4, ... tokens are merged in pairs, and for i in the later and j in the earlier segment of a
pair D(i, j) = prefix(i) + suffix(j), sums inside one segment each and both <= 0. The same doubling
inverts I + A: with the inverse of the segments' blocks known and C the part of A that crosses from
the later to the earlier segments,

    (I + A)^-1 <- (I + A)^-1 - (I + A)^-1 C (I + A)^-1

which is block forward substitution and stays accurate for nearly parallel keys (KF-K03). All of it
is float32.

Dims: `Bn` chunks, `Tb` tokens of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.numerics import contract, round_to, sigmoid_f32
from pallas_kernels.ragged import from_blocks, row_blocks, to_blocks


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
    chunk: int,
) -> tuple[Float[Array, "T N Dv"], Float32[Array, "S N Dv Dk"], Float32[Array, "S N Dv Dk"]]:
    """See `api.kda_prefill`."""
    blocks = row_blocks(row_offsets, num_tokens=q_TNDk.shape[0], block=chunk)

    def chunks(x: Array) -> Array:  # [T, N, ...] -> [Bn, N, Tb, ...]; zero where there is no token
        return jnp.moveaxis(to_blocks(x, blocks), 1, 2)

    with jax.named_scope("chunks"):
        q_BnNTbDk = chunks(normalise(q_TNDk) * q_TNDk.shape[-1] ** -0.5)
        k_BnNTbDk = chunks(normalise(k_TNDk))
        v_BnNTbDv = chunks(v_TNDv.astype(jnp.float32))
        g_BnNTbDk = chunks(kda_gate(f_TNDk, A_log_N, dt_bias_NDk, lower_bound))
        beta_BnNTb1 = chunks(sigmoid_f32(b_TN))[..., None]

        prefix, suffix, inverse, attend = _solve_chunks(
            q_BnNTbDk, k_BnNTbDk, g_BnNTbDk, beta_BnNTb1
        )
        q_in_BnNTbDk = q_BnNTbDk * jnp.exp(prefix)
        k_in_BnNTbDk = k_BnNTbDk * jnp.exp(prefix)
        k_out_BnNTbDk = k_BnNTbDk * jnp.exp(suffix)
        decay_BnNDk = jnp.exp(prefix[:, :, -1])
        u_BnNTbDv = contract("bnij,bnjv->bniv", inverse, beta_BnNTb1 * v_BnNTbDv)
        w_BnNTbDk = contract("bnij,bnjk->bnik", inverse, beta_BnNTb1 * k_in_BnNTbDk)

    num_rows = state_SNDvDk.shape[0]
    safe_Bn = jnp.minimum(blocks.row_Bn, num_rows - 1)
    exported_Bn = export_tokens_S[safe_Bn]
    # An unused block puts back what it read.
    used_Bn = blocks.row_Bn < num_rows
    source_Bn = safe_Bn + jnp.where(blocks.start_Bn > exported_Bn, num_rows, 0)
    target_Bn = safe_Bn + jnp.where(blocks.start_Bn >= exported_Bn, num_rows, 0)
    target_Bn = jnp.where(used_Bn, target_Bn, source_Bn)

    def one_chunk(states: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        source, target, used, *arrays = inputs
        u_NTbDv, w_NTbDk, q_in_NTbDk, attend_NTbTb, k_out_NTbDk, decay_NDk = arrays
        old_NDvDk = lax.dynamic_index_in_dim(states, source, keepdims=False)
        v_NTbDv = u_NTbDv - contract("ntk,nvk->ntv", w_NTbDk, old_NDvDk)
        o_NTbDv = contract("ntk,nvk->ntv", q_in_NTbDk, old_NDvDk)
        o_NTbDv += contract("nij,njv->niv", attend_NTbTb, v_NTbDv)
        new_NDvDk = decay_NDk[:, None, :] * old_NDvDk
        new_NDvDk += contract("ntv,ntk->nvk", v_NTbDv, k_out_NTbDk)
        new_NDvDk = jnp.where(used, new_NDvDk, old_NDvDk)
        return lax.dynamic_update_index_in_dim(states, new_NDvDk, target, 0), o_NTbDv

    with jax.named_scope("recurrence"):
        inputs = (
            source_Bn,
            target_Bn,
            used_Bn,
            u_BnNTbDv,
            w_BnNTbDk,
            q_in_BnNTbDk,
            attend,
            k_out_BnNTbDk,
            decay_BnNDk,
        )
        both = jnp.concatenate([state_SNDvDk, state_SNDvDk])
        both, o_BnNTbDv = lax.scan(one_chunk, both, inputs)
    o_TNDv = round_to(from_blocks(jnp.moveaxis(o_BnNTbDv, 2, 1), blocks), q_TNDk.dtype)
    return o_TNDv, both[num_rows:], both[:num_rows]


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
) -> tuple[Float[Array, "S N Dv"], Float32[Array, "S N Dv Dk"]]:
    """See `api.kda_decode`."""
    q_f32 = normalise(q_SNDk) * q_SNDk.shape[-1] ** -0.5
    k_f32 = normalise(k_SNDk)
    decay_SNDk = jnp.exp(kda_gate(f_SNDk, A_log_N, dt_bias_NDk, lower_bound))
    state_SNDvDk = state_SNDvDk * decay_SNDk[:, :, None, :]
    error_SNDv = v_SNDv.astype(jnp.float32) - contract("snvk,snk->snv", state_SNDvDk, k_f32)
    u_SNDv = sigmoid_f32(b_SN)[:, :, None] * error_SNDv
    state_SNDvDk = state_SNDvDk + u_SNDv[:, :, :, None] * k_f32[:, :, None, :]
    return round_to(contract("snvk,snk->snv", state_SNDvDk, q_f32), q_SNDk.dtype), state_SNDvDk


def normalise(x: Float[Array, "*lead D"]) -> Float32[Array, "*lead D"]:
    """L2-normalise the last axis in float32; the epsilon is added to the SUM of squares."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _solve_chunks(
    q: Float32[Array, "Bn N Tb Dk"],
    k: Float32[Array, "Bn N Tb Dk"],
    g: Float32[Array, "Bn N Tb Dk"],
    beta: Float32[Array, "Bn N Tb 1"],
) -> tuple[Array, Array, Array, Array]:
    """Solve every chunk by doubling (see the module docstring).

    Returns:
      prefix [Bn, N, Tb, Dk]: sum of g from the chunk's start through the token;
      suffix [Bn, N, Tb, Dk]: sum of g after the token to the chunk's end;
      inverse [Bn, N, Tb, Tb]: (I + A)^-1;
      attend [Bn, N, Tb, Tb]: B.
    """
    chunk = g.shape[2]
    identity = jnp.eye(chunk, dtype=jnp.float32)[None, None]

    def merge(carry: tuple[Array, ...], pair: _Pairs) -> tuple[tuple[Array, ...], None]:
        prefix, suffix, inverse, attend = carry
        k_early = k * jnp.exp(suffix)
        cross_A = contract("bnik,bnjk->bnij", beta * k * jnp.exp(prefix), k_early)
        cross_B = contract("bnik,bnjk->bnij", q * jnp.exp(prefix), k_early)
        attend = jnp.where(pair.crosses, cross_B, attend)
        change = contract("bnij,bnjk->bnik", jnp.where(pair.crosses, cross_A, 0.0), inverse)
        inverse = inverse - contract("bnij,bnjk->bnik", inverse, change)
        # Both totals are read before either sum grows to the length of the pair.
        total_early, total_late = prefix[:, :, pair.early_end], prefix[:, :, pair.late_end]
        prefix = prefix + jnp.where(pair.is_late, total_early, 0.0)
        suffix = suffix + jnp.where(pair.is_late, 0.0, total_late)
        return (prefix, suffix, inverse, attend), None

    same_token = identity * jnp.sum(q * k, axis=-1, keepdims=True)
    start = (g, jnp.zeros_like(g), jnp.broadcast_to(identity, same_token.shape), same_token)
    (prefix, suffix, inverse, attend), _ = lax.scan(merge, start, _pairs(chunk))
    return prefix, suffix, inverse, attend


class _Pairs(NamedTuple):
    """How the tokens of a chunk pair up at each doubling; the leading axis is the doubling."""

    is_late: np.ndarray  # bool [levels, Tb, 1]: the token is in the later segment of its pair
    early_end: np.ndarray  # int32 [levels, Tb]: last token of the earlier segment of its pair
    late_end: np.ndarray  # int32 [levels, Tb]: last token of the later segment of its pair
    crosses: np.ndarray  # bool [levels, Tb, Tb]: row in the later, column in the earlier of a pair


def _pairs(chunk: int) -> _Pairs:
    length = 2 ** np.arange(chunk.bit_length() - 1, dtype=np.int32)[:, None]
    token = np.arange(chunk, dtype=np.int32)[None, :]
    pair, is_late = token // (2 * length), token // length % 2 == 1
    return _Pairs(
        is_late=is_late[:, :, None],
        early_end=2 * length * pair + length - 1,
        late_end=2 * length * pair + 2 * length - 1,
        crosses=(pair[:, :, None] == pair[:, None, :]) & is_late[:, :, None] & ~is_late[:, None, :],
    )
