"""The end of a serving step: the tokens that come of it, and the drafts of those behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt16

from k3jax.choice import Asked, choose, filters_of
from k3jax.draft import cache, model
from k3jax.draft.acceptance import Accepted, verify, verify_greedily
from k3jax.inputs import GIVEN
from k3jax.layers import linear_f32
from k3jax.program import DRAFT_PREFIX, Program
from k3jax.run import Run, apply
from k3jax.sampling import best, draft_gumbel, sample, tempered
from k3jax.step_meta import last_token_of_row
from sharding import collectives


class Drawn(NamedTuple):
    """What the rows of a step drew.

    Attributes:
      newest: tokens of the row buffers, newest token and drafts. scores: those of the drafts.
      tokens, num_tokens: that the rows generated, and how many of them.
      logprobs: of those tokens, of all replicas.
      result: for the host, without the load. For both see `k3jax.results`.
    """

    newest: Int32[Array, "S X"]
    scores: Float32[Array, "S N V"]
    pool: UInt16[Array, "Z P W words"]
    tokens: Int32[Array, "S X"]
    num_tokens: Int32[Array, " S"]
    logprobs: Int32[Array, "dp S X n"]
    result: list[Int32[Array, " n"]]


def sampled(program: Program, run: Run, fields: Mapping[str, Array], asked: Asked) -> Drawn:
    """One token behind the last of each row."""
    meta = run.meta
    rows = meta.lengths.shape[0]
    logits = run.logits(run.take(last_token_of_row(meta.row_offsets)))
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    nothing = jnp.zeros(rows, jnp.int32)

    def drawn(logits_SXV: Float32[Array, "S 1 V"]) -> Accepted:
        ids = sample(logits_SXV[:, 0], filters_of(fields), fields["seeds"], meta.context)
        return Accepted(nothing, ids)

    def greedy(logits_SXV: Float32[Array, "S 1 V"]) -> Accepted:
        return Accepted(nothing, best(logits_SXV[:, 0]))

    with jax.named_scope("sample"):
        drafts = jnp.zeros((rows, 0), jnp.int32)
        chosen, logprobs = choose(
            run, fields, asked, logits[:, None], drafts, meta.context, drawn=drawn, greedy=greedy
        )
    is_given = fields["sample"] == GIVEN
    ids = jnp.where(is_given, fields["following"], chosen.next_token)
    newest, scores, pool = _look_ahead(
        program, run, fields, run.forward.pool, meta.used, ids, meta.context
    )
    return Drawn(
        newest, scores, pool, ids[:, None], (~is_given).astype(jnp.int32), logprobs,
        [ids, finite.astype(jnp.int32)],
    )  # fmt: skip


def verified(program: Program, run: Run, fields: Mapping[str, Array], asked: Asked) -> Drawn:
    """The drafts that stay, the token behind them, and the states as far as they stay."""
    meta = run.meta
    rows, slots = meta.lengths.shape[0], 1 + meta.num_drafts
    hidden = meta.to_slots(run.all())
    logits = run.logits(hidden.reshape(rows * slots, -1)).reshape(rows, slots, -1)
    is_used = jnp.arange(slots)[None] < meta.lengths[:, None]
    finite = jnp.all(jnp.isfinite(logits) | ~is_used[:, :, None], axis=(1, 2))
    drafts = meta.to_slots(run.tokens)[:, 1:]
    num_drafts, positions = jnp.maximum(meta.lengths - 1, 0), meta.computed + 1

    def drawn(logits_SXV: Float32[Array, "S X V"]) -> Accepted:
        scores = run.buffers.scores
        return verify(
            logits_SXV, drafts, num_drafts, filters_of(fields), fields["seeds"], positions,
            draft_SNV=scores[fields["slots"]] if scores.shape[1] else None,
        )  # fmt: skip

    def greedy(logits_SXV: Float32[Array, "S X V"]) -> Accepted:
        return verify_greedily(logits_SXV, drafts, num_drafts)

    with jax.named_scope("accept"):
        verdict, logprobs = choose(
            run, fields, asked, logits, drafts, positions, drawn=drawn, greedy=greedy
        )
    staying = jnp.where(meta.lengths > 0, 1 + verdict.num_drafts, 0)
    pool = apply(
        run.model, run.params, run.forward.trials, staying, run.forward.pool, meta, method="commit"
    )
    is_staying = meta.from_slots(jnp.arange(slots)[None] < staying[:, None])
    newest, scores, pool = _look_ahead(
        program, run, fields, pool, meta.used & is_staying, verdict.next_token,
        meta.computed + staying,
    )  # fmt: skip
    result = [
        verdict.next_token, finite.astype(jnp.int32), verdict.num_drafts, drafts.reshape(-1)
    ]  # fmt: skip
    return Drawn(newest, scores, pool, verdict.tokens(drafts), staying, logprobs, result)


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


def _look_ahead(
    program: Program,
    run: Run,
    fields: Mapping[str, Array],
    pool: UInt16[Array, "Z P W words"],
    is_kept: Bool[Array, " T"],
    newest: Int32[Array, " S"],
    positions: Int32[Array, " S"],
) -> tuple[Int32[Array, "S X"], Float32[Array, "S N V"], UInt16[Array, "Z P W words"]]:
    """Let the draft model, if there is one, propose what follows each row's newest token.

    Args:
      is_kept: tokens of the step that stay.
      positions: of the newest tokens.

    Returns:
      Newest tokens with their drafts, the scores of these, and the pool.
    """
    rows = newest.shape[0]
    none = jnp.zeros((rows, 0, program.cfg.vocab_size), jnp.float32)
    if program.draft is None:
        return newest[:, None], none, pool
    pool = _keep_context(program, run, pool, is_kept)
    with jax.named_scope("draft"):
        logits = _block_logits(program, run, pool, newest, positions)

        def likeliest(_: Array, scores: Float32[Array, "S V"]) -> Array:
            return best(scores)

        if program.draft_sampling == "greedy":
            drafts, _ = model.propose(_draft_params(run), logits, newest, likeliest)
            return jnp.concatenate([newest[:, None], drafts], axis=1), none, pool
        temperature = fields["temperature"]

        def drawn(place: Array, scores: Float32[Array, "S V"]) -> Array:
            noise = draft_gumbel(fields["seeds"], positions + 1 + place, scores.shape[1])
            return best(tempered(scores, temperature) + noise)

        drafts, scores = model.propose(_draft_params(run), logits, newest, drawn)
        scores = jax.vmap(lambda x: tempered(x, temperature), 1, 1)(scores)
        return jnp.concatenate([newest[:, None], drafts], axis=1), scores, pool


def _block_logits(
    program: Program,
    run: Run,
    pool: UInt16[Array, "Z P W words"],
    anchors: Int32[Array, " S"],
    positions: Int32[Array, " S"],
) -> Float32[Array, "S N V"]:
    """Logits of the draft model's block behind each row's newest token, the anchor."""
    draft, params = program.draft, _draft_params(run)
    assert draft is not None
    place = jnp.arange(program.num_drafts, dtype=jnp.int32)
    tokens = jnp.where(place[None] == 0, anchors[:, None], draft.mask_token_id)
    rows, width = tokens.shape
    top = params["top"] if draft.has_own_vocab else run.params["top"]
    embedded = collectives.embed(top["embed"], tokens.reshape(-1)).reshape(rows, width, -1)
    hidden = model.block_hidden(
        params,
        draft,
        embedded,
        positions[:, None] + place[None],
        lambda layer, query, own: cache.attend(
            pool, run.meta.attention_pages, positions, query, own, draft, program.draft_cache, layer
        ),
    )
    flat = linear_f32(hidden.reshape(rows * width, -1), top["lm_head"])
    return collectives.gather_columns(flat).reshape(rows, width, -1)


def _draft_params(run: Run) -> model.Params:
    """The draft's own parameters."""
    return {
        name.removeprefix(DRAFT_PREFIX): part
        for name, part in run.params.items()
        if name.startswith(DRAFT_PREFIX)
    }
