"""Reference KDA: the recurrence as written, one token at a time, in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.numerics import contract, round_to, sigmoid_f32
from pallas_kernels.ragged import row_ids


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
    """See `api.kda_prefill`; `chunk` has no meaning here, any number of tokens can be exported."""
    del chunk
    num_tokens, num_rows = q_TNDk.shape[0], state_SNDvDk.shape[0]
    q_TNDk, k_TNDk, v_TNDv = (x.astype(jnp.float32) for x in (q_TNDk, k_TNDk, v_TNDv))
    q_TNDk = q_TNDk / jnp.sqrt(jnp.sum(q_TNDk**2, axis=-1, keepdims=True) + 1e-6)
    k_TNDk = k_TNDk / jnp.sqrt(jnp.sum(k_TNDk**2, axis=-1, keepdims=True) + 1e-6)
    q_TNDk = q_TNDk * q_TNDk.shape[-1] ** -0.5
    decay_TNDk = jnp.exp(kda_gate(f_TNDk, A_log_N, dt_bias_NDk, lower_bound))
    beta_TN = sigmoid_f32(b_TN)

    row_T = row_ids(row_offsets, num_tokens)
    last_exported_S = row_offsets[:-1] + export_tokens_S - 1

    def token(
        states: tuple[Array, Array], inputs: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        (state, exported), (q_NDk, k_NDk, v_NDv, decay_NDk, beta_N, row, token_idx) = states, inputs
        s_NDvDk = state[jnp.minimum(row, num_rows - 1)] * decay_NDk[:, None, :]
        u_NDv = beta_N[:, None] * (v_NDv - contract("nvk,nk->nv", s_NDvDk, k_NDk))
        s_NDvDk = s_NDvDk + u_NDv[:, :, None] * k_NDk[:, None, :]
        o_NDv = jnp.where(row < num_rows, contract("nvk,nk->nv", s_NDvDk, q_NDk), 0.0)
        is_exported = last_exported_S.at[row].get(mode="fill", fill_value=-1) == token_idx
        exported = exported.at[jnp.where(is_exported, row, num_rows)].set(s_NDvDk, mode="drop")
        return (state.at[row].set(s_NDvDk, mode="drop"), exported), o_NDv

    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    inputs = (q_TNDk, k_TNDk, v_TNDv, decay_TNDk, beta_TN, row_T, token_T)
    (new_state, exported), o_TNDv = lax.scan(token, (state_SNDvDk, state_SNDvDk), inputs)
    return round_to(o_TNDv, b_TN.dtype), new_state, exported


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
    num_rows = state_SNDvDk.shape[0]
    rows = (jnp.arange(num_rows + 1, dtype=jnp.int32), jnp.zeros(num_rows, jnp.int32))
    activations = (q_SNDk, k_SNDk, v_SNDv, f_SNDk, b_SN)
    parameters = (A_log_N, dt_bias_NDk, state_SNDvDk)
    o_SNDv, state_SNDvDk, _ = kda_prefill(
        *activations, *parameters, *rows, lower_bound=lower_bound, chunk=1
    )
    return o_SNDv, state_SNDvDk
