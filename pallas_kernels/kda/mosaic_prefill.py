"""`kda_prefill` in two kernels for Hopper: `prefill_prepare` over all chunks, then
`prefill_recurrence` over the rows.

Between them lie 1160 bytes a token and head, more than the inputs: a chunk's preparation is a long
chain of dependent steps, and only many chunks at once fill the device. Chunks are cut from each
row's first token, so a row's bits depend neither on the batch nor on how a prompt was split, as
long as it was split at multiples of 64 tokens.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.hopper import require_hopper
from pallas_kernels.kda.prefill_decays import LOWEST_BOUND
from pallas_kernels.kda.prefill_prepare import prepare
from pallas_kernels.kda.prefill_recurrence import recur
from pallas_kernels.kda.prefill_tiles import CHUNK, DIM
from pallas_kernels.numerics import sigmoid_f32
from pallas_kernels.ragged import row_blocks, to_blocks

_MULTIPROCESSORS = 132


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
    """See `api.kda_prefill`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments outside those of the released model.
    """
    require_hopper()
    if q_TNDk.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 activations: got {q_TNDk.dtype}")
    if state_SNDvDk.shape[2:] != (DIM, DIM):
        raise NotImplementedError(f"takes head dim {DIM}: got {state_SNDvDk.shape[2:]}")
    if chunk != CHUNK:
        raise NotImplementedError(f"takes chunks of {CHUNK} tokens: got {chunk}")
    if lower_bound is None or lower_bound < LOWEST_BOUND:
        raise NotImplementedError(f"takes gates bounded by {LOWEST_BOUND}: got {lower_bound}")
    return launch(
        q_TNDk, k_TNDk, v_TNDv, f_TNDk, b_TN, A_log_N, dt_bias_NDk, state_SNDvDk, row_offsets,
        export_tokens_S, lower_bound=lower_bound,
    )  # fmt: skip


# Jitted, so that a program of many layers lowers and compiles the kernels once.
@functools.partial(jax.jit, static_argnames=("lower_bound", "interpret"))
def launch(
    q_TND: Array,
    k_TND: Array,
    v_TND: Array,
    f_TND: Array,
    b_TN: Array,
    A_log_N: Array,
    dt_bias_ND: Array,
    state_SNDvDk: Array,
    row_offsets: Array,
    export_tokens_S: Array,
    *,
    lower_bound: float,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Run the kernels, or interpret them on a CPU. Arguments as in `kda_prefill`."""
    num_tokens, heads, _ = q_TND.shape
    num_rows = state_SNDvDk.shape[0]
    with jax.named_scope("chunks"):
        blocks = row_blocks(row_offsets, num_tokens=num_tokens, block=CHUNK)
        count_Bn = jnp.sum(blocks.mask_BnTb, axis=1, dtype=jnp.int32)
        beta_BnNTb = jnp.moveaxis(to_blocks(sigmoid_f32(b_TN), blocks), 1, 2)
        beta_BnNTb = jnp.where(blocks.mask_BnTb[:, None], beta_BnNTb, 0.0)
        rate_N = -math.log2(math.e) * jnp.exp(A_log_N)
        if num_tokens < CHUNK:  # a copy takes whole chunks, and only clips those at the end
            missing = ((0, CHUNK - num_tokens), (0, 0), (0, 0))
            q_TND, k_TND, v_TND, f_TND = (jnp.pad(x, missing) for x in (q_TND, k_TND, v_TND, f_TND))
        w, ut, k_out, q_in, attend, decay = prepare(
            blocks.token_BnTb[:, 0],
            count_Bn,
            q_TND,
            k_TND,
            v_TND,
            f_TND,
            beta_BnNTb,
            rate_N,
            rate_N[:, None] * dt_bias_ND,
            lower_bound=lower_bound,
            interpret=interpret,
        )
    with jax.named_scope("recurrence"):
        length_S = row_offsets[1:] - row_offsets[:-1]
        end_S = jnp.cumsum((length_S + CHUNK - 1) // CHUNK, dtype=jnp.int32)
        first_block_S = end_S - (length_S + CHUNK - 1) // CHUNK
        # Few rows: more blocks of threads, a deep ring. Many: two halves of a head share loads.
        is_small = 2 * num_rows * heads <= _MULTIPROCESSORS
        o_TND, new, exported = recur(
            w,
            ut,
            k_out,
            q_in,
            attend,
            decay,
            state_SNDvDk,
            row_offsets,
            first_block_S,
            export_tokens_S,
            num_tokens=max(num_tokens, CHUNK),
            warpgroups=1 if is_small else 2,
            stages=3 if is_small else 2,
            interpret=interpret,
        )
    return o_TND[:num_tokens], new, exported
