"""The draft model against a float64 oracle, alone and on two ranks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.draft import model
from k3jax.draft.config import DraftConfig, GqaShape
from k3jax.draft.rope import inverse_frequencies
from k3jax.params import describe
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from sharding.specs import partition_spec
from tests import draft_oracle, tiny
from tests.unit.test_draft_config import MLA, SMALL_GQA, SMALL_MLA

CONTEXT, BLOCK = 23, 4
CONFIGS = {
    "mla": SMALL_MLA,
    "mla-causal-window": SMALL_MLA | {"causal_block": True, "context_window": 5},
    "gqa": SMALL_GQA,
}


def _attend(cfg: DraftConfig, context: jax.Array) -> model.Attend:
    """Dense attention of blocks over their context `[Z, S, T, C]`."""

    def attend(layer: int, query: jax.Array, own: jax.Array) -> jax.Array:
        entries = jnp.concatenate([context[layer], own], axis=1)
        slots, width = entries.shape[1], own.shape[1]
        start = slots - width
        slot, row = jnp.arange(slots)[None], start + jnp.arange(width)[:, None]
        seen = (slot >= start) | (slot >= start - (cfg.window or slots))
        if cfg.is_causal:
            seen &= slot <= row
        if isinstance(cfg.attention, GqaShape):
            key, value = jnp.split(entries, 2, axis=-1)
            heads = (*entries.shape[:2], -1, cfg.attention.head_dim)
            group = query.shape[2] * cfg.attention.head_dim // key.shape[-1]
            key, value = (jnp.repeat(x.reshape(heads), group, axis=2) for x in (key, value))
            scores = jnp.einsum("sxnd,stnd->sxnt", query, key) * cfg.softmax_scale
            weight = jax.nn.softmax(jnp.where(seen[None, :, None], scores, -jnp.inf), axis=-1)
            return jnp.einsum("sxnt,stnd->sxnd", weight, value)
        scores = jnp.einsum("sxnc,stc->sxnt", query, entries) * cfg.softmax_scale
        weight = jax.nn.softmax(jnp.where(seen[None, :, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("sxnt,stc->sxnc", weight, entries[..., : cfg.attention.kv_lora_rank])

    return attend


@functools.cache
def _inputs(name: str) -> tuple[DraftConfig, dict, np.ndarray, np.ndarray]:
    cfg = DraftConfig.from_hf(CONFIGS[name])
    rng = np.random.default_rng(0)
    width = len(cfg.tap_layers) * cfg.target_hidden_size
    taps = rng.standard_normal((2, CONTEXT, width)).astype(np.float32)
    embedded = rng.standard_normal((2, BLOCK, cfg.hidden_size)).astype(np.float32)
    return cfg, tiny.random_params(cfg), taps, embedded


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_kf_s08_a_block_equals_the_oracle(name: str, tp: int) -> None:
    cfg, params, taps, embedded = _inputs(name)
    parallel = ParallelConfig(tp=tp)

    def run(params: dict, taps: jax.Array, embedded: jax.Array) -> jax.Array:
        rows, tokens = taps.shape[:2]
        position = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), rows)
        context = model.context_entries(
            params, cfg, taps.reshape(rows * tokens, -1), position
        ).reshape(cfg.num_layers, rows, tokens, -1)
        positions = jnp.tile(tokens + jnp.arange(BLOCK, dtype=jnp.int32)[None], (rows, 1))
        return model.block_hidden(params, cfg, embedded, positions, _attend(cfg, context))

    specs = {
        part: {leaf: partition_spec(spec.axes, parallel) for leaf, spec in leaves.items()}
        for part, leaves in describe(cfg).items()
    }
    sharded = jax.shard_map(
        run, mesh=make_mesh(parallel), in_specs=(specs, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    got = np.asarray(jax.jit(sharded)(params, taps, embedded))
    want = [draft_oracle.block(cfg, params, *row) for row in zip(taps, embedded, strict=True)]
    np.testing.assert_allclose(got, np.stack(want), atol=2e-5)


def test_yarn_turns_pairs_15_to_26_of_the_released_draft() -> None:
    rope = DraftConfig.from_hf(MLA).rope
    plain = 50000.0 ** (-np.arange(32) / 32)
    ratio = inverse_frequencies(rope) / plain
    np.testing.assert_allclose(ratio[:16], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[26:], 1 / 32, rtol=1e-6)
    np.testing.assert_allclose(ratio[20], 1 - 5 / 11 * (31 / 32), rtol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_taken_one_after_the_other(tp: int) -> None:
    cfg, params, _, _ = _inputs("mla")
    rng = np.random.default_rng(1)
    base = (3 * rng.standard_normal((2, BLOCK, cfg.vocab_size))).astype(np.float32)
    hidden = rng.standard_normal((2, BLOCK, cfg.hidden_size)).astype(np.float32)
    anchor = np.array([5, 17], np.int32)
    parallel = ParallelConfig(tp=tp)

    def run(markov: dict, confidence: dict, base: jax.Array) -> tuple[jax.Array, ...]:
        params = {"markov": markov, "confidence": confidence}
        choose = lambda _, logits: jnp.argmax(logits, -1).astype(jnp.int32)  # noqa: E731
        drafts, logits = model.propose(params, base, jnp.asarray(anchor), choose)
        return (
            drafts,
            logits,
            model.confidence(params, jnp.asarray(hidden), jnp.asarray(anchor), drafts),
        )

    everywhere = PartitionSpec()
    specs = {"w1": everywhere, "w2": partition_spec(("vocab", None), parallel)}
    drafts, logits, sure = jax.jit(
        jax.shard_map(
            run, mesh=make_mesh(parallel), in_specs=(specs, everywhere, everywhere),
            out_specs=everywhere, check_vma=False,
        )
    )(params["markov"], params["confidence"], base)  # fmt: skip
    w1, w2 = (np.asarray(params["markov"][name], np.float64) for name in ("w1", "w2"))
    proj, bias = (np.asarray(params["confidence"][name], np.float64) for name in ("proj", "bias"))
    for row in range(2):
        prev = anchor[row]
        for place in range(BLOCK):
            want = base[row, place] + w2 @ w1[prev]
            np.testing.assert_allclose(logits[row, place], want, atol=1e-5)
            score = np.concatenate([hidden[row, place], w1[prev]]) @ proj + bias
            np.testing.assert_allclose(sure[row, place], 1 / (1 + np.exp(-score[0])), atol=1e-6)
            prev = int(drafts[row, place])
            assert prev == want.argmax()
    assert (np.asarray(drafts) != base.argmax(-1)).any()
