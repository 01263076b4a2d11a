"""Tokens of KDA layers on trial: checks and dispatch of `kda_verify_paged` and `kda_commit_paged`.

Speculative decoding runs several tokens of a row in one step and keeps some of them. Verification
gives the outputs that as many calls of `kda_decode_paged` would give and leaves the pool as it is.
Once the accepted tokens are known, the commit folds them into the state, in their order and with
the same arithmetic,

    S <- S diag(decay) + u k^T

so that a rejected token leaves no trace. Dims: `X` token slots of a row, `K` taps.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.checks import bind_dims, check_activations, check_dtypes, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.kda import composed_verify, mosaic_commit, mosaic_verify, xla_verify
from pallas_kernels.kda.paged import check_layer
from pallas_kernels.kda.records import KdaRecords

MAX_SLOTS = 8

KDA_VERIFY_PAGED = Op(
    name="kda_verify_paged",
    implementations={
        "reference": composed_verify.kda_verify_paged,
        "xla": xla_verify.kda_verify_paged,
        "mosaic": mosaic_verify.kda_verify_paged,
    },
)
KDA_COMMIT_PAGED = Op(
    name="kda_commit_paged",
    implementations={
        "reference": composed_verify.kda_commit_paged,
        "xla": composed_verify.kda_commit_paged,
        "mosaic": mosaic_commit.kda_commit_paged,
    },
)


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
    implementation: str | None = None,
) -> tuple[Float[Array, "S X N D"], KdaRecords]:
    """Run up to X tokens of every row from its state in the pool, which stays as it is.

    Args:
      qkv_SX3ND, f_SXND, b_SXN, gate_SXND: as in `kda_decode_paged`, of X = 1 to 8 token slots.
      taps_3NDK, A_log_N, dt_bias_ND, o_norm_D, pool_ZPWE, position: as there.
      source_S: page of each row's state before its first token; 0 for one that starts from zeros.
      lengths_S: tokens of each row, 0 to X, in its first slots; 0 for a row not in use.
      lower_bound, eps, implementation: as in `kda_decode_paged`.

    Returns:
      The input of the output projection, in the compute dtype, zero for slots not in use; and what
      `kda_commit_paged` needs besides raw qkv and f.

    Raises:
      ValueError, TypeError: as `kda_decode_paged`, or more slots than 8.
    """
    op = KDA_VERIFY_PAGED.name
    activations = {
        "qkv_SX3ND": qkv_SX3ND, "f_SXND": f_SXND, "b_SXN": b_SXN, "gate_SXND": gate_SXND
    }  # fmt: skip
    parameters = {
        "taps_3NDK": taps_3NDK, "A_log_N": A_log_N, "dt_bias_ND": dt_bias_ND, "o_norm_D": o_norm_D
    }  # fmt: skip
    rows = {"source_S": source_S, "lengths_S": lengths_S}
    check_activations(op, **activations)
    check_dtypes(op, [jnp.float32], **parameters)
    check_dtypes(op, [jnp.int32], **rows)
    dims = bind_dims(op, **activations, **parameters, **rows, pool_ZPWE=pool_ZPWE)
    _check_slots(op, dims["X"])
    check_layer(
        op, qkv_SX3ND, pool_ZPWE, taps=dims["K"], position=position, lower_bound=lower_bound
    )
    return run(
        KDA_VERIFY_PAGED,
        implementation,
        *activations.values(),
        *parameters.values(),
        pool_ZPWE,
        *rows.values(),
        position=position,
        lower_bound=lower_bound,
        eps=eps,
    )


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
    implementation: str | None = None,
) -> UInt16[Array, "Z P W E"]:
    """Store each row's state and window after its first accepted tokens.

    Args:
      records: of the verification. The other arrays before the pages: its arguments.
      source_S: page of each row's state before the verified tokens, as there.
      target_S: page of the state after the accepted ones, which no other row names; 0 for a row not
        in use.
      accepted_S: how many tokens to keep, at most those that were verified. Of none, the target
        gets a copy of the source.
      taps: of the convolution.
      position, lower_bound, implementation: as in `kda_verify_paged`.

    Returns:
      The pool with the new states, in the same buffer if it was donated. With the implementation
      of the verification they are bitwise those of as many calls of `kda_decode_paged` if that is
      "mosaic"; else up to the order in which XLA rounds.

    Raises:
      ValueError, TypeError: as `kda_verify_paged`.
    """
    op = KDA_COMMIT_PAGED.name
    activations = {"qkv_SX3ND": qkv_SX3ND, "f_SXND": f_SXND}
    parameters = {"A_log_N": A_log_N, "dt_bias_ND": dt_bias_ND}
    rows = {"source_S": source_S, "target_S": target_S, "accepted_S": accepted_S}
    check_activations(op, **activations, k_SXND=records.k_SXND)
    check_dtypes(op, [jnp.float32], **parameters, u_SXND=records.u_SXND)
    check_dtypes(op, [jnp.int32], **rows)
    dims = bind_dims(
        op, **activations, u_SXND=records.u_SXND, k_SXND=records.k_SXND, **parameters, **rows,
        pool_ZPWE=pool_ZPWE,
    )  # fmt: skip
    _check_slots(op, dims["X"])
    check_layer(op, qkv_SX3ND, pool_ZPWE, taps=taps, position=position, lower_bound=lower_bound)
    return run(
        KDA_COMMIT_PAGED,
        implementation,
        records,
        *activations.values(),
        *parameters.values(),
        pool_ZPWE,
        *rows.values(),
        position=position,
        lower_bound=lower_bound,
        taps=taps,
    )


def _check_slots(op: str, num_slots: int) -> None:
    if not 1 <= num_slots <= MAX_SLOTS:
        raise ValueError(
            wrong(op, "token slots", num_slots, f"1 to {MAX_SLOTS}", "verify fewer drafts")
        )
