"""Ragged batches: flat tokens cut into rows by offsets, and blocks aligned to the rows.

`row_offsets` is int32[S+1], non-decreasing, with `row_offsets[0] == 0`: row s owns the tokens
`[row_offsets[s], row_offsets[s+1])`, possibly none. Tokens from `row_offsets[S]` on are padding:
they may hold anything, NaN included, and what is computed for them is zero.

Dims used here and by the chunked operators: `Bn` blocks, `Tb` tokens of a block.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlocks:
    """Blocks of Tb consecutive tokens of one row, in row order; unused blocks come last.

    | field | meaning |
    |---|---|
    | `row_Bn` | row that owns the block; S for an unused block |
    | `start_Bn` | position inside the row of the block's first token |
    | `token_BnTb` | flat token index; T where the block has no token |
    | `slot_T` | index of a token in the flattened blocks; Bn * Tb for padding tokens |
    """

    row_Bn: Int32[Array, " Bn"]
    start_Bn: Int32[Array, " Bn"]
    token_BnTb: Int32[Array, "Bn Tb"]
    slot_T: Int32[Array, " T"]

    @property
    def mask_BnTb(self) -> Bool[Array, "Bn Tb"]:
        """True where the block holds a token."""
        return self.token_BnTb < self.slot_T.shape[0]


def row_ids(row_offsets: Int32[Array, " S1"], num_tokens: int) -> Int32[Array, " T"]:
    """Return the row of each of `num_tokens` flat tokens; S for padding tokens."""
    return _find(row_offsets[1:], jnp.arange(num_tokens, dtype=jnp.int32))


def row_blocks(row_offsets: Int32[Array, " S1"], *, num_tokens: int, block: int) -> RowBlocks:
    """Cut the rows into blocks of `block` tokens that start at each row's first token.

    The number of blocks is static: the most that `num_tokens` tokens in S rows can need.
    """
    num_rows = row_offsets.shape[0] - 1
    num_blocks = min(num_tokens, (num_tokens + num_rows * (block - 1)) // block)
    first_token_S = row_offsets[:-1]
    length_S = row_offsets[1:] - first_token_S
    count_S = (length_S + block - 1) // block
    end_S = jnp.cumsum(count_S, dtype=jnp.int32)
    first_block_S = end_S - count_S

    block_Bn = jnp.arange(num_blocks, dtype=jnp.int32)
    row_Bn = _find(end_S, block_Bn)
    safe_Bn = jnp.minimum(row_Bn, num_rows - 1)
    start_Bn = (block_Bn - first_block_S[safe_Bn]) * block
    position_BnTb = start_Bn[:, None] + jnp.arange(block, dtype=jnp.int32)[None, :]
    used_BnTb = (row_Bn < num_rows)[:, None] & (position_BnTb < length_S[safe_Bn][:, None])

    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = row_ids(row_offsets, num_tokens)
    safe_T = jnp.minimum(row_T, num_rows - 1)
    slot_T = first_block_S[safe_T] * block + token_T - first_token_S[safe_T]
    return RowBlocks(
        row_Bn=row_Bn,
        start_Bn=start_Bn,
        token_BnTb=jnp.where(
            used_BnTb, first_token_S[safe_Bn][:, None] + position_BnTb, num_tokens
        ),
        slot_T=jnp.where(row_T < num_rows, slot_T, num_blocks * block),
    )


def to_blocks(x: Shaped[Array, " T *rest"], blocks: RowBlocks) -> Shaped[Array, "Bn Tb *rest"]:
    """Gather flat tokens into blocks; places without a token are zero."""
    return x.at[blocks.token_BnTb].get(mode="fill", fill_value=0)


def from_blocks(y: Shaped[Array, "Bn Tb *rest"], blocks: RowBlocks) -> Shaped[Array, " T *rest"]:
    """Gather blocks back into flat tokens; padding tokens are zero."""
    return y.reshape(-1, *y.shape[2:]).at[blocks.slot_T].get(mode="fill", fill_value=0)


def _find(end_S: Int32[Array, " S"], index_B: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Return how many of the non-decreasing `end_S` are at or before each index."""
    return jnp.searchsorted(end_S, index_B, side="right", method="compare_all").astype(jnp.int32)
