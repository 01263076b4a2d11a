"""One decode step of a KDA layer on the page pool: checks and dispatch of `kda_decode_paged`.

In the order of the arithmetic: the short convolution, the decay gate, the delta rule of
`pallas_kernels.kda.api`, and the norm with the output gate,

    y = o * rsqrt(mean o^2 + eps) * o_norm * sigmoid(gate)

so that a step reads a row's state from its page and writes it back once.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.checks import bind_dims, check_activations, check_dtypes, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.kda import composed, mosaic_decode, triton_decode
from pallas_kernels.words import words_per_number

KDA_DECODE_PAGED = Op(
    name="kda_decode_paged",
    implementations={
        "reference": functools.partial(composed.kda_decode_paged, implementation="reference"),
        "xla": functools.partial(composed.kda_decode_paged, implementation="xla"),
        "mosaic": mosaic_decode.kda_decode_paged,
        "triton": triton_decode.kda_decode_paged,
    },
    unproven={"triton": triton_decode.unproven},
)


def kda_decode_paged(
    qkv_S3ND: Float[Array, "S 3 N D"],
    f_SND: Float[Array, "S N D"],
    b_SN: Float[Array, "S N"],
    gate_SND: Float[Array, "S N D"],
    taps_3NDX: Float32[Array, "3 N D X"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    o_norm_D: Float32[Array, " D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "S N D"], UInt16[Array, "Z P W E"]]:
    """Run one token of every row, with the states in the pool.

    Args:
      qkv_S3ND: projected queries, keys and values before the convolution, in the compute dtype.
      f_SND: gate input before `dt_bias`. b_SN: write strength before the sigmoid.
      gate_SND: output gate before the sigmoid.
      taps_3NDX: weights of the convolution, oldest to newest.
      A_log_N, dt_bias_ND: parameters of the decay gate. o_norm_D: weight of the output norm.
      pool_ZPWE: see `pallas_kernels.kda.pages`. position: of this layer.
      source_S: page of each row's state before the token; 0 for a row that starts from zeros.
      target_S: page of the state after it, which no other row names; 0 for a row not in use.
      lower_bound: as in `kda_prefill`. eps: of the output norm.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      The input of the output projection, in the compute dtype, zero for a row not in use; and the
      pool with the new states, in the same buffer if it was donated.

    Raises:
      ValueError, TypeError: shapes, dtypes, `position` or `lower_bound` are not as above, or a
        state does not fit in a page.
    """
    op = KDA_DECODE_PAGED.name
    activations = {"qkv_S3ND": qkv_S3ND, "f_SND": f_SND, "b_SN": b_SN, "gate_SND": gate_SND}
    parameters = {
        "taps_3NDX": taps_3NDX, "A_log_N": A_log_N, "dt_bias_ND": dt_bias_ND, "o_norm_D": o_norm_D
    }  # fmt: skip
    pages = {"source_S": source_S, "target_S": target_S}
    check_activations(op, **activations)
    check_dtypes(op, [jnp.float32], **parameters)
    check_dtypes(op, [jnp.int32], **pages)
    dims = bind_dims(op, **activations, **parameters, **pages, pool_ZPWE=pool_ZPWE)
    check_layer(op, qkv_S3ND, pool_ZPWE, taps=dims["X"], position=position, lower_bound=lower_bound)
    return run(
        KDA_DECODE_PAGED,
        implementation,
        *activations.values(),
        *parameters.values(),
        pool_ZPWE,
        *pages.values(),
        position=position,
        lower_bound=lower_bound,
        eps=eps,
    )


def check_layer(
    op: str,
    qkv: Float[Array, "... N D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    *,
    taps: int,
    position: int,
    lower_bound: float | None,
) -> None:
    """Raise ValueError or TypeError if a layer's gate, or its states in the pool, are impossible.

    Args:
      qkv: in the dtype of the windows. taps: of the convolution.
    """
    check_dtypes(op, [jnp.uint16], pool_ZPWE=pool_ZPWE)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            wrong(
                op, "lower_bound", lower_bound, "a negative number", "pass None for softplus gates"
            )
        )
    num_positions, _, page_tokens, entry_words = pool_ZPWE.shape
    if not 0 <= position < num_positions:
        raise ValueError(
            wrong(op, "position", position, f"0 to {num_positions - 1}", "see the pool")
        )
    (heads, dim), page_words = qkv.shape[-2:], page_tokens * entry_words
    window_words = 3 * (taps - 1) * heads * dim * words_per_number(qkv.dtype)
    needed = window_words + heads * dim * dim * words_per_number(jnp.float32)
    if page_words < needed:
        raise ValueError(
            wrong(op, "page size", f"{page_words} words", f"{needed} or more", "add tokens")
        )
