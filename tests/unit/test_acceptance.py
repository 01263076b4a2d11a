"""Acceptance rules: what comes out is distributed as the target model says (KF-S05, KF-S07)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.draft.acceptance import Accepted, accept
from k3jax.sampling import Filters, filtered, sample, tempered

VOCAB, DRAFTS, SAMPLES = 5, 3, 60_000
RULES = ("rejection", "block")


def _chain(seed: int) -> np.ndarray:
    """Probabilities of the next token given the one before it, [V, V]."""
    weights = np.random.default_rng(seed).random((VOCAB, VOCAB)) ** 3 + 1e-3
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


P = _chain(1)
Q = (P + _chain(2)) / 2


def _draw(rng: np.random.Generator, probs: np.ndarray) -> np.ndarray:
    """One token for each row of probabilities."""
    return (probs.cumsum(-1) < rng.random((len(probs), 1))).sum(-1).clip(max=VOCAB - 1)


@functools.cache
def _run(rule: str, *, certain: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first two tokens of many rows that begin after token 0, and the drafts that were taken.

    Rows propose 0 to 3 drafts, drawn from `Q`, or with `certain` the most likely of `Q`.
    """
    rng = np.random.default_rng(7)
    tokens = [np.zeros(SAMPLES, np.int64)]
    for _ in range(DRAFTS):
        probs = Q[tokens[-1]]
        tokens.append(probs.argmax(-1) if certain else _draw(rng, probs))
    path = np.stack(tokens, axis=1)
    drafts = path[:, 1:]
    num_drafts = rng.integers(0, DRAFTS + 1, SAMPLES)
    verify = jax.jit(functools.partial(accept, rule=rule))
    got: Accepted = verify(
        jnp.log(P[path]),
        jnp.asarray(drafts, jnp.int32),
        None if certain else jnp.log(Q[path[:, :-1]]),
        jnp.asarray(num_drafts, jnp.int32),
        jnp.arange(SAMPLES, dtype=jnp.uint32),
        jnp.full(SAMPLES, 11, jnp.int32),
    )
    num, following = np.asarray(got.num_drafts), np.asarray(got.next_token)
    assert (num <= num_drafts).all()
    first = np.where(num > 0, drafts[:, 0], following)
    second = np.where(num > 1, drafts[:, 1], np.where(num == 1, following, _draw(rng, P[first])))
    return first * VOCAB + second, num


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_kf_s07_tokens_are_distributed_as_the_target_says(rule: str, certain: bool) -> None:
    pairs, num = _run(rule, certain=certain)
    want = (P[0][:, None] * P).reshape(-1)
    seen = np.bincount(pairs, minlength=VOCAB**2)
    chi_square = (((seen - SAMPLES * want) ** 2) / (SAMPLES * want)).sum()
    assert chi_square < 52.6, chi_square  # 24 degrees of freedom: one in 1,500
    assert 0.5 * np.abs(seen / SAMPLES - want).sum() < 0.01
    assert (num > 0).any()
    assert 0.5 * np.abs((Q[0][:, None] * Q).reshape(-1) - want).sum() > 0.1


def test_block_verification_takes_more() -> None:
    rejection, block = (_run(rule, certain=False)[1].mean() for rule in RULES)
    assert block > rejection


@pytest.mark.parametrize("rule", RULES)
def test_kf_s05_at_temperature_zero_every_token_is_the_targets_best(rule: str) -> None:
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((64, DRAFTS + 1, VOCAB)))
    logits = logits.astype(jnp.float32)
    best = np.asarray(logits.argmax(-1))
    rng = np.random.default_rng(4)
    drafts = np.where(rng.random((64, DRAFTS)) < 0.7, best[:, :-1], rng.integers(0, VOCAB))
    target = jax.vmap(lambda x: tempered(x, jnp.zeros(DRAFTS + 1)))(logits)
    q = jnp.log(jax.nn.softmax(jnp.asarray(rng.standard_normal((64, DRAFTS, VOCAB)), jnp.float32)))
    for draft in (None, q):
        got = accept(
            target, jnp.asarray(drafts, jnp.int32), draft, jnp.full(64, DRAFTS, jnp.int32),
            jnp.arange(64, dtype=jnp.uint32), jnp.zeros(64, jnp.int32), rule=rule,
        )  # fmt: skip
        num = np.cumprod(drafts == best[:, :-1], axis=1).sum(1)
        np.testing.assert_array_equal(got.num_drafts, num)
        np.testing.assert_array_equal(got.next_token, best[np.arange(64), num])


@pytest.mark.parametrize("rule", RULES)
def test_a_row_without_drafts_draws_what_plain_sampling_draws(rule: str) -> None:
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((16, VOCAB)), jnp.float32)
    filters = Filters(
        jnp.full(16, 0.8), jnp.full(16, 3, jnp.int32), jnp.full(16, 0.9), jnp.full(16, 0.1)
    )
    seeds, positions = jnp.arange(16, dtype=jnp.uint32), jnp.arange(16, dtype=jnp.int32)
    want = sample(logits, filters, seeds, positions)
    target = jnp.repeat(filtered(logits, filters)[:, None], DRAFTS + 1, axis=1)
    target = target.at[:, 1:].set(jnp.nan)  # never read
    drafts = jnp.zeros((16, DRAFTS), jnp.int32)
    got = accept(target, drafts, None, jnp.zeros(16, jnp.int32), seeds, positions, rule=rule)
    np.testing.assert_array_equal(got.num_drafts, 0)
    np.testing.assert_array_equal(got.next_token, want)


def test_filtered_keeps_exactly_what_the_filters_say() -> None:
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.1, 0.1, 0.1]] * 9))
    filters = Filters(
        temperature=jnp.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 2.0]),
        top_k=jnp.array([0, 3, 0, -1, 0, 0, 0, 4, 0], jnp.int32),
        top_p=jnp.array([1.0, 1.0, 0.69, 0.75, 1.0, 1.0, 0.5, 1.0, 1.0]),
        min_p=jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.26, 0.26, 0.2, 0.45]),
    )
    kept = np.isfinite(np.asarray(filtered(logits, filters)))
    # Of equal tokens the lower ids come first. What min-p leaves is shared out before top-p counts,
    # and its share is that after the temperature.
    assert kept.sum(-1).tolist() == [5, 3, 2, 3, 1, 2, 1, 4, 5]
    np.testing.assert_array_equal(kept, np.arange(5)[None] < kept.sum(-1)[:, None])


def test_rows_without_ranks_keep_the_same_beside_one_that_has_some() -> None:
    logits = jnp.asarray(np.random.default_rng(7).integers(0, 4, (6, 50)), jnp.float32)  # ties
    filters = Filters(
        temperature=jnp.array([0.0, 0.5, 1.0, 0.0, 2.0, 1.0]),
        top_k=jnp.array([3, 0, 50, 0, -1, 7], jnp.int32),
        top_p=jnp.array([0.2, 1.0, 1.0, 1.0, 1.0, 1.0]),
        min_p=jnp.array([0.0, 0.0, 0.3, 0.0, 0.7, 0.0]),
    )
    together = filtered(logits, filters)
    alone = filtered(logits[:5], jax.tree.map(lambda x: x[:5], filters))  # nothing is sorted
    np.testing.assert_array_equal(together[:5], alone)
    assert np.isfinite(np.asarray(together)).sum(-1).tolist()[5] == 7


def test_tempered_is_filtered_without_other_filters() -> None:
    logits = jnp.asarray(np.random.default_rng(6).integers(0, 4, (6, VOCAB)), jnp.float32)  # ties
    temperature = jnp.array([0.0, 0.5, 1.0, 0.0, 2.0, 0.0])
    zeros = jnp.zeros(6)
    off = Filters(temperature, zeros.astype(jnp.int32), jnp.ones(6), zeros)
    np.testing.assert_array_equal(tempered(logits, temperature), filtered(logits, off))
