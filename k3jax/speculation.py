"""The end of a serving step: the tokens that come of it, and the drafts of those behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt16

from k3jax.draft import cache, model
from k3jax.draft.acceptance import verify
from k3jax.program import DRAFT_PREFIX, Program
from k3jax.run import Run, apply
from k3jax.sampling import best, sample
from k3jax.step_meta import last_token_of_row
from sharding import collectives


class Drawn(NamedTuple):
    """What the rows of a step drew.

    Attributes:
      tokens: newest token and drafts, for the token buffer.
      result: for the host, without the load; see `k3jax.results`.
    """

    tokens: Int32[Array, "S X"]
    pool: UInt16[Array, "Z P W words"]
    result: list[Int32[Array, " n"]]


def sampled(program: Program, run: Run, fields: Mapping[str, Array]) -> Drawn:
    """One token behind the last of each row."""
    logits = run.logits(run.take(last_token_of_row(run.meta.row_offsets)))
    with jax.named_scope("sample"):
        ids, finite = sample(
            logits,
            fields["temperature"],
            fields["top_k"],
            fields["top_p"],
            fields["seeds"],
            run.meta.context,
        )
    pool = run.forward.pool
    tokens = ids[:, None]
    if program.draft is not None:
        pool = _keep_context(program, run, pool, run.meta.used)
        drafts = _drafts(program, run, pool, ids, run.meta.context)
        tokens = jnp.concatenate([tokens, drafts], axis=1)
    return Drawn(tokens, pool, [ids, finite.astype(jnp.int32)])


def verified(program: Program, run: Run, fields: Mapping[str, Array]) -> Drawn:
    """The drafts that stay, the token behind them, and the states as far as they stay."""
    meta = run.meta
    rows, slots = meta.lengths.shape[0], 1 + meta.num_drafts
    hidden = meta.to_slots(run.all())
    logits = run.logits(hidden.reshape(rows * slots, -1)).reshape(rows, slots, -1)
    is_used = jnp.arange(slots)[None] < meta.lengths[:, None]
    finite = jnp.all(jnp.isfinite(logits) | ~is_used[:, :, None], axis=(1, 2))
    drafts = meta.to_slots(run.tokens)[:, 1:]
    with jax.named_scope("accept"):
        verdict = verify(
            logits,
            drafts,
            jnp.maximum(meta.lengths - 1, 0),
            fields["temperature"],
            fields["top_k"],
            fields["top_p"],
            fields["seeds"],
            meta.computed + 1,
        )
    staying = jnp.where(meta.lengths > 0, 1 + verdict.num_drafts, 0)
    pool = apply(
        run.model, run.params, run.forward.trials, staying, run.forward.pool, meta, method="commit"
    )
    tokens = verdict.next_token[:, None]
    if program.draft is not None:
        is_staying = jnp.arange(slots)[None] < staying[:, None]
        pool = _keep_context(program, run, pool, meta.used & meta.from_slots(is_staying))
        following = _drafts(program, run, pool, verdict.next_token, meta.computed + staying)
        tokens = jnp.concatenate([tokens, following], axis=1)
    result = [
        verdict.next_token, finite.astype(jnp.int32), verdict.num_drafts, drafts.reshape(-1)
    ]  # fmt: skip
    return Drawn(tokens, pool, result)


def _keep_context(
    program: Program,
    run: Run,
    pool: UInt16[Array, "Z P W words"],
    is_kept: Bool[Array, " T"],
) -> UInt16[Array, "Z P W words"]:
    """Store what the draft model keeps of the step's tokens."""
    assert program.draft is not None
    with jax.named_scope("draft/context"):
        taps = run.forward.taps
        taps = collectives.gather_tokens(taps) if run.is_sharded else taps
        meta = run.meta
        entries = model.context_entries(
            _draft_params(run), program.draft, taps, meta.token_positions
        )
        pages = jnp.where(is_kept, meta.token_pages, program.layout.num_pages)
        return cache.write(pool, entries, pages, meta.token_offsets, program.draft_cache)


def _drafts(
    program: Program,
    run: Run,
    pool: UInt16[Array, "Z P W words"],
    anchors: Int32[Array, " S"],
    positions: Int32[Array, " S"],
) -> Int32[Array, "S N"]:
    """Propose the tokens behind each row's newest one, which stands at `positions`."""
    draft, params = program.draft, _draft_params(run)
    assert draft is not None
    place = jnp.arange(program.num_drafts, dtype=jnp.int32)
    tokens = jnp.where(place[None] == 0, anchors[:, None], draft.mask_token_id)
    with jax.named_scope("draft"):
        rows, width = tokens.shape
        top = params["top"] if draft.has_own_vocab else run.params["top"]
        embedded = collectives.embed(top["embed"], tokens.reshape(-1)).reshape(rows, width, -1)
        hidden = model.block_hidden(
            params,
            draft,
            embedded,
            positions[:, None] + place[None],
            lambda layer, query, own: cache.attend(
                pool, run.meta.attention_pages, positions, query, own, draft, program.draft_cache,
                layer,
            ),
        )  # fmt: skip
        logits = collectives.gather_columns(
            model.linear_f32(hidden.reshape(rows * width, -1), top["lm_head"])
        )
        drafts, _ = model.propose(
            params, logits.reshape(rows, width, -1), anchors, lambda _, scores: best(scores)
        )
        return drafts


def _draft_params(run: Run) -> model.Params:
    """The draft's own parameters."""
    return {
        name.removeprefix(DRAFT_PREFIX): part
        for name, part in run.params.items()
        if name.startswith(DRAFT_PREFIX)
    }
