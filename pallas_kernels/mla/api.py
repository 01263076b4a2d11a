"""Public MLA operators: checks and dispatch.

A token's cache entry is C numbers: the normed latent (the first `latent` of them, also the value),
then the unrotated shared key part. Per head, with the absorbed query q of C numbers,

    p = softmax( scale * q . entry ),   z = sum_slots p * entry[:latent]

over the visible slots of the row. Slot i of a row is place i % W of page `page_table[row, i // W]`.
The result depends on the set of visible entries only, not on their positions (KF-M06).

| array | dims |
|---|---|
| `pool_ZPWCw` | uint16: layer positions, pages, tokens of a page, words of an entry |
| `page_table_SM` | int32: pages of each row in order; past a row's context any page may stand |
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels.checks import (
    bind_dims,
    check_activations,
    check_dtypes,
    check_row_offsets,
    wrong,
)
from pallas_kernels.dispatch import Op, run
from pallas_kernels.mla import mosaic_decode, mosaic_prefill, reference, xla
from pallas_kernels.words import words_per_number

MLA_WRITE = Op(
    name="mla_write", implementations={"reference": reference.mla_write, "xla": xla.mla_write}
)
MLA_DECODE = Op(
    name="mla_decode",
    implementations={
        "reference": reference.mla_decode,
        "xla": xla.mla_decode,
        "mosaic": mosaic_decode.mla_decode,
    },
)
MLA_PREFILL = Op(
    name="mla_prefill",
    implementations={
        "reference": reference.mla_prefill,
        "xla": xla.mla_prefill,
        "mosaic": mosaic_prefill.mla_prefill,
    },
)


def mla_write(
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    entries_TC: Float[Array, "T C"],
    pages_T: Int32[Array, " T"],
    offsets_T: Int32[Array, " T"],
    *,
    position: int,
    implementation: str | None = None,
) -> UInt16[Array, "Z P W Cw"]:
    """Write the entries of new tokens; in place when the pool is donated.

    Args:
      pool_ZPWCw: the pool. Cw = C stores bfloat16, Cw = 2C stores float32.
      entries_TC: one entry a token; rounded if the pool is narrower.
      pages_T: page of each token; P or more drops the token (padding).
      offsets_T: place inside the page, below W.
      position: layer position, static.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      The pool with those entries overwritten. Two tokens must not name the same place.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree, or `position` is out of range.
    """
    op = "mla_write"
    dims = bind_dims(
        op, pool_ZPWCw=pool_ZPWCw, entries_TC=entries_TC, pages_T=pages_T, offsets_T=offsets_T
    )
    check_activations(op, entries_TC=entries_TC)
    check_dtypes(op, [jnp.int32], pages_T=pages_T, offsets_T=offsets_T)
    if dims["Cw"] not in (dims["C"], 2 * dims["C"]):
        raise ValueError(
            wrong(
                op,
                "words of a pool entry",
                dims["Cw"],
                f"{dims['C']} (bfloat16) or {2 * dims['C']} (float32)",
                "pass the pool's MLA view",
            )
        )
    _check_position(op, position, dims["Z"])
    dtype = jnp.bfloat16 if dims["Cw"] == dims["C"] else jnp.float32
    return run(
        MLA_WRITE,
        implementation,
        pool_ZPWCw,
        entries_TC,
        pages_T,
        offsets_T,
        position=position,
        dtype=dtype,
    )


def mla_decode(
    q_SNC: Float[Array, "S N C"],
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    page_table_SM: Int32[Array, "S M"],
    context_S: Int32[Array, " S"],
    *,
    position: int,
    latent: int,
    dtype: DTypeLike,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "S N latent"]:
    """Attend with one query token a row.

    Args:
      q_SNC: absorbed queries, float32 or bfloat16 (the compute dtype).
      pool_ZPWCw, page_table_SM: see the module; the new tokens' entries are already written.
      context_S: visible slots of each row, the new token included; 0 marks a padding row.
      position: layer position, static.
      latent: how many leading numbers of an entry are the value.
      dtype: what the pool stores, bfloat16 or float32.
      scale: multiplies the scores.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      z [S, N, latent] in the compute dtype; zero for padding rows.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree, or `position` or `latent` is out of range.
    """
    arrays = {
        "q_SNC": q_SNC,
        "pool_ZPWCw": pool_ZPWCw,
        "page_table_SM": page_table_SM,
        "context_S": context_S,
    }
    _check_attention("mla_decode", arrays, position, latent, dtype)
    return run(
        MLA_DECODE,
        implementation,
        *arrays.values(),
        position=position,
        latent=latent,
        dtype=dtype,
        scale=scale,
    )


def mla_prefill(
    q_TNC: Float[Array, "T N C"],
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    page_table_SM: Int32[Array, "S M"],
    computed_S: Int32[Array, " S"],
    row_offsets: Int32[Array, " S1"],
    *,
    position: int,
    latent: int,
    dtype: DTypeLike,
    scale: float,
    block: int = 64,
    implementation: str | None = None,
) -> Float[Array, "T N latent"]:
    """Attend with ragged rows of query tokens, causally.

    Args:
      computed_S: slots in use before this step; token i of row s sees the slots up to and including
        computed_S[s] + i.
      row_offsets: see `pallas_kernels.ragged`.
      block: query tokens that are processed together.
      Others as in `mla_decode`.

    Returns:
      z [T, N, latent] in the compute dtype; zero for padding tokens.

    Raises:
      ValueError, TypeError: as `mla_decode`, or `block` is not positive.
    """
    op = "mla_prefill"
    arrays = {
        "q_TNC": q_TNC,
        "pool_ZPWCw": pool_ZPWCw,
        "page_table_SM": page_table_SM,
        "computed_S": computed_S,
    }
    dims = _check_attention(op, arrays, position, latent, dtype)
    check_row_offsets(op, row_offsets, dims["S"])
    if block < 1:
        raise ValueError(wrong(op, "block", block, "at least 1", "use 64"))
    return run(
        MLA_PREFILL,
        implementation,
        *arrays.values(),
        row_offsets,
        position=position,
        latent=latent,
        dtype=dtype,
        scale=scale,
        block=block,
    )


def _check_attention(
    op: str, arrays: dict[str, Array], position: int, latent: int, dtype: DTypeLike
) -> dict[str, int]:
    dims = bind_dims(op, **arrays)
    query, pool, *tables = arrays
    check_activations(op, **{query: arrays[query]})
    check_dtypes(op, [jnp.uint16], **{pool: arrays[pool]})
    check_dtypes(op, [jnp.int32], **{name: arrays[name] for name in tables})
    words = dims["C"] * words_per_number(dtype)
    if dims["Cw"] != words:
        expected = f"{words} for {dims['C']} numbers of {jnp.dtype(dtype)}"
        raise ValueError(
            wrong(op, "words of a pool entry", dims["Cw"], expected, "pass the pool's MLA view")
        )
    _check_position(op, position, dims["Z"])
    if not 0 < latent <= dims["C"]:
        raise ValueError(
            wrong(op, "latent", latent, f"1 to {dims['C']}", "pass the width of the value part")
        )
    return dims


def _check_position(op: str, position: int, num_positions: int) -> None:
    if not 0 <= position < num_positions:
        raise ValueError(
            wrong(op, "position", position, f"0 to {num_positions - 1}", "pass a layer position")
        )
