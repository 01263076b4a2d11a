"""Where the tokens of a step belong: rows, positions and pages, derived on the device."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, Shaped

from k3jax.buckets import Bucket, Kind


@struct.dataclass
class StepMeta:
    """Index arrays that all layers of a step share.

    Attributes:
      kind: `decode` without drafts promises that row `s` has the one token `s`, or none.
      num_drafts: drafts that a row of a decode step can bring behind its token.
      row_offsets: row `s` owns tokens `row_offsets[s]:row_offsets[s + 1]`.
      computed: tokens of the row that the cache already holds.
      context: tokens of the row after this step; 0 for a row not in use.
      used: token is not padding.
      token_positions: of each token in its row's sequence.
      token_pages, token_offsets: where the token's MLA entry goes; a page beyond the pool drops it.
      attention_pages: page of each `page_tokens` positions of a row.
      state_source, state_target: state page of a row and recurrent group, before and after the
        step.
      export_tokens: of the row's tokens, after how many its state is stored as well; 0 for no
        export.
      export_pages: state page for that, of a row and recurrent group; 0 for no export.
    """

    kind: Kind = struct.field(pytree_node=False)
    num_drafts: int = struct.field(pytree_node=False)
    row_offsets: Int32[Array, " S1"]
    computed: Int32[Array, " S"]
    context: Int32[Array, " S"]
    used: Bool[Array, " T"]
    token_positions: Int32[Array, " T"]
    token_pages: Int32[Array, " T"]
    token_offsets: Int32[Array, " T"]
    attention_pages: Int32[Array, "S M"]
    state_source: Int32[Array, "S G"]
    state_target: Int32[Array, "S G"]
    export_tokens: Int32[Array, " S"]
    export_pages: Int32[Array, "S G"]

    @property
    def lengths(self) -> Int32[Array, " S"]:
        """Tokens of each row in this step."""
        return self.row_offsets[1:] - self.row_offsets[:-1]

    def to_slots(self, x: Shaped[Array, " T *dims"]) -> Shaped[Array, " S X *dims"]:
        """Flat tokens as `1 + num_drafts` slots of each row; slots not in use hold anything."""
        slot = jnp.arange(1 + self.num_drafts, dtype=jnp.int32)
        token = self.row_offsets[:-1, None] + slot[None]
        return x[jnp.minimum(token, x.shape[0] - 1)]

    def from_slots(self, x: Shaped[Array, " S X *dims"]) -> Shaped[Array, " T *dims"]:
        """The inverse of `to_slots`; padding tokens hold anything."""
        token = jnp.arange(self.used.shape[0], dtype=jnp.int32)
        row = row_of_token(self.row_offsets, token.shape[0])
        slot = jnp.clip(token - self.row_offsets[row], 0, self.num_drafts)
        return x[row, slot]


def row_of_token(row_offsets: Int32[Array, " S1"], num_tokens: int) -> Int32[Array, " T"]:
    """Row of each flat token; the last row for padding."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(row_offsets[1:], token, side="right").astype(jnp.int32)
    return jnp.minimum(row, row_offsets.shape[0] - 2)


def step_meta(
    bucket: Bucket,
    row_offsets: Int32[Array, " S1"],
    computed: Int32[Array, " S"],
    attention_pages: Int32[Array, "S M"],
    state_source: Int32[Array, "S G"],
    state_target: Int32[Array, "S G"],
    export_tokens: Int32[Array, " S"],
    export_pages: Int32[Array, "S G"],
    *,
    page_tokens: int,
    num_pages: int,
) -> StepMeta:
    """Derive the shared index arrays of a step."""
    num_rows = computed.shape[0]
    token = jnp.arange(bucket.tokens, dtype=jnp.int32)
    used = token < row_offsets[num_rows]
    row = row_of_token(row_offsets, bucket.tokens)
    position = computed[row] + token - row_offsets[row]
    column = jnp.clip(position // page_tokens, 0, attention_pages.shape[1] - 1)
    lengths = row_offsets[1:] - row_offsets[:-1]
    in_use = lengths > 0
    return StepMeta(
        kind=bucket.kind,
        num_drafts=bucket.num_drafts,
        row_offsets=row_offsets,
        computed=computed,
        context=jnp.where(in_use, computed + lengths, 0),
        used=used,
        token_positions=position,
        token_pages=jnp.where(used, attention_pages[row, column], num_pages),
        token_offsets=position % page_tokens,
        attention_pages=attention_pages,
        # An unused row reads nobody's state and writes nowhere.
        state_source=jnp.where(in_use[:, None], state_source, 0),
        state_target=jnp.where(in_use[:, None], state_target, 0),
        export_tokens=export_tokens,
        export_pages=jnp.where(in_use[:, None], export_pages, 0),
    )


def last_token_of_row(row_offsets: Int32[Array, " S1"]) -> Int32[Array, " S"]:
    """Index of each row's last token; 0 for a row not in use."""
    return jnp.maximum(row_offsets[1:] - 1, 0)
