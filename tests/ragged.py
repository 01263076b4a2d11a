"""What `ragged_all_to_all` does, from collectives that XLA:CPU has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from sharding import dispatch


def ragged_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axis_name: tuple[str, ...],
) -> Array:
    """Rank `s` copies `send_sizes[d]` rows, from `input_offsets[d]` on, to `output_offsets[d]` of
    rank `d`. Where the receiver expects another number of rows, its output is NaN."""
    me = lax.axis_index(axis_name)
    sent, starts, sizes, targets = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    place = jnp.arange(output.shape[0], dtype=jnp.int32)
    for rank in range(sent.shape[0]):
        offset = place - targets[rank, me]
        is_hit = (offset >= 0) & (offset < sizes[rank, me])
        rows = sent[rank].at[starts[rank, me] + jnp.where(is_hit, offset, 0)].get(mode="clip")
        output = jnp.where(is_hit[:, None], rows, output)
    agrees = jnp.all(sizes[:, me] == recv_sizes)
    return jnp.where(
        agrees, output, jnp.full_like(output, jnp.nan if output.dtype.kind == "f" else -1)
    )


def emulate_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test run the ragged exchange where the platform does not have it."""
    if jax.default_backend() in dispatch.NOT_RAGGED:
        monkeypatch.setattr(dispatch, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(dispatch, "NOT_RAGGED", frozenset())
