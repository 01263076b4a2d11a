"""Penalties, biases and log probabilities against their definitions in NumPy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import controls
from k3jax.adjust import adjusted, count, set_controls, set_masks
from k3jax.controls import (
    CALL_SIZE,
    COUNT_WIDTH,
    IN_PROMPT,
    MASK_ROWS,
    MAX_BIASES,
    Bias,
    RowControls,
    RowMask,
)
from k3jax.logprobs import packed_logprobs
from k3jax.results import unpack_logprobs

VOCAB, ROWS, SLOTS = 23, 5, 3
OFF: dict[str, Any] = {
    "presence": 0.0, "frequency": 0.0, "repetition": 1.0, "biased": 0, "masked": 0,
}  # fmt: skip


def fields_of(*rows: dict[str, Any], slots: list[int]) -> dict[str, jax.Array]:
    """Inputs of a step whose rows have some controls."""
    columns = {name: [(OFF | row)[name] for row in rows] for name in OFF}
    kinds = {"biased": np.int32, "masked": np.int32} | dict.fromkeys(
        ("presence", "frequency", "repetition"), np.float32
    )
    arrays = {name: jnp.asarray(np.array(columns[name], kinds[name])) for name in OFF}
    return arrays | {"slots": jnp.asarray(np.array(slots, np.int32))}


def buffers_with(*rows: RowControls, vocab: int = VOCAB) -> tuple[jax.Array, jax.Array]:
    """Buffers of one replica, full of something else before these rows were set."""
    counts = jnp.full((ROWS + 1, vocab), 77, jnp.int32)
    biases = jnp.full((ROWS + 1, 3, MAX_BIASES), 3, jnp.int32)
    for call in controls.calls([rows], ROWS):
        assert call.shape == (1, CALL_SIZE)
        counts, biases = set_controls(counts, biases, jnp.asarray(call[0]))
    return counts, biases


def oracle(
    logits: np.ndarray, prompt: list[int], output: list[int], row: dict[str, Any],
    biases: list[Bias], position: int,
) -> np.ndarray:  # fmt: skip
    """Logits of one place, token by token."""
    row, after = OFF | row, logits.astype(np.float64).copy()
    for bias in biases:
        if position < bias.until:
            after[bias.token] += bias.value
    for token in range(len(after)):
        times = output.count(token)
        if times or token in prompt:
            factor = row["repetition"]
            after[token] = after[token] / factor if after[token] > 0 else after[token] * factor
        after[token] -= row["frequency"] * times + row["presence"] * (times > 0)
    return after


def test_every_place_of_a_block_is_penalised_as_if_what_stands_before_it_were_generated() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"presence": 0.7, "frequency": -0.3, "repetition": 1.3, "biased": 1},
        {"biased": 1},
        {},
        {"repetition": 0.6},
    ]
    slots, positions = [4, 0, 2, 1], np.array([9, 8, 7, 6], np.int32)
    prompts = [rng.integers(0, VOCAB, 6).tolist() for _ in rows]
    outputs = [rng.integers(0, 6, 9).tolist() for _ in rows]
    biases = [
        [Bias(3, 2.5), Bias(4, -math.inf, 10), Bias(3, -1.0)], [Bias(21, -math.inf, 8)], [], [],
    ]  # fmt: skip
    counts, entries = buffers_with(
        *(
            RowControls(slot, tuple(prompt), tuple(output), tuple(pairs))
            for slot, prompt, output, pairs in zip(slots, prompts, outputs, biases, strict=True)
        )
    )
    logits = rng.standard_normal((4, SLOTS, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, 6, (4, SLOTS - 1)).astype(np.int32)
    drafts[0] = 5  # twice the same
    masks = jnp.zeros((ROWS + 1, 1), jnp.int32)  # of no row here
    got = adjusted(
        jnp.asarray(logits), jnp.asarray(drafts), counts, entries, masks, jnp.asarray(positions),
        fields_of(*rows, slots=slots),
    )  # fmt: skip
    for index, row in enumerate(rows):
        for place in range(SLOTS):
            want = oracle(
                logits[index, place], prompts[index],
                outputs[index] + drafts[index, :place].tolist(), row, biases[index],
                int(positions[index]) + place,
            )  # fmt: skip
            np.testing.assert_allclose(np.asarray(got)[index, place], want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(got)[2], logits[2])  # bit by bit
    assert np.isneginf(np.asarray(got)[0, 0, 4])
    assert np.isfinite(np.asarray(got)[0, 1:, 4]).all()  # from position 10 on


def test_only_tokens_of_penalised_rows_are_counted() -> None:
    counts, _ = buffers_with(RowControls(3, (1,), (2,), ()), RowControls(1, (), (), ()))
    fields = fields_of({"presence": 0.5}, {}, slots=[3, 1])
    tokens = jnp.array([[2, 2, 7], [4, 4, 4]], jnp.int32)
    is_new = jnp.array([[True, True, False], [True, True, True]])
    got = np.asarray(count(counts, tokens, is_new, fields))
    assert got[3].tolist() == [0, IN_PROMPT, 3, *([0] * (VOCAB - 3))]
    assert not got[1].any()
    np.testing.assert_array_equal(got[0], 77)


def test_a_long_history_is_set_with_several_calls_and_replaces_the_row() -> None:
    vocab = 3 * COUNT_WIDTH
    prompt, output = tuple(range(1, vocab - 5)), (0, 5, 5)
    counts, _ = buffers_with(RowControls(2, prompt, output, ()), vocab=vocab)
    want = np.zeros(vocab, np.int32)
    want[list(prompt)] = IN_PROMPT
    want[0] += 1
    want[5] += 2
    np.testing.assert_array_equal(np.asarray(counts)[2], want)
    np.testing.assert_array_equal(np.asarray(counts)[1], 77)


def test_replicas_with_less_to_set_write_to_the_scratch_row() -> None:
    one = RowControls(0, (1,), (), ())
    first, second = controls.calls([[one, one], [one]], ROWS)
    assert first[:, 0].tolist() == [0, 0]
    assert second[:, 0].tolist() == [0, ROWS]


@pytest.mark.parametrize("vocab", [7, 64])
def test_log_probabilities_are_those_of_the_softmax(vocab: int) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, vocab)).astype(np.float32) * 5
    logits[1] = 0.0  # equal ones stand by id
    chosen = np.array([3, 1, 6, 0], np.int32)
    packed = np.asarray(packed_logprobs(jnp.asarray(logits), jnp.asarray(chosen)))
    for num_top in (0, 3, 20):
        told = unpack_logprobs(packed, num_top)
        for row, token, one in zip(logits, chosen, told, strict=True):
            want = row - np.log(np.exp(row.astype(np.float64)).sum())
            order = np.argsort(-row, kind="stable")[:num_top]
            assert one.top_ids == tuple(order)
            np.testing.assert_allclose(one.top, want[order], atol=1e-5)
            np.testing.assert_allclose(one.chosen, want[token], atol=1e-5)


def test_a_row_with_a_mask_keeps_only_what_is_in_it() -> None:
    rng, vocab = np.random.default_rng(1), 70  # the last word is not full
    allowed = rng.random((3, vocab)) < 0.4
    words = [
        np.packbits(np.pad(row, (0, 96 - vocab)), bitorder="little").view(np.int32)
        for row in allowed
    ]
    masks = jnp.full((ROWS + 1, 3), -1, jnp.int32)
    rows = [[RowMask(slot, row) for slot, row in zip((4, 0, 3), words, strict=True)]]
    for call in controls.mask_calls(rows, vocab, ROWS):
        masks = set_masks(masks, jnp.asarray(call[0]))
    slots, masked = [3, 1, 4, 0], [1, 0, 1, 0]
    fields = fields_of(*({"masked": on} for on in masked), slots=slots)
    logits = rng.standard_normal((4, 1, vocab)).astype(np.float32)
    counts, entries = buffers_with(RowControls(0, (), (), ()), vocab=vocab)
    got = adjusted(
        jnp.asarray(logits), jnp.zeros((4, 0), jnp.int32), counts, entries, masks,
        jnp.zeros(4, jnp.int32), fields,
    )  # fmt: skip
    want = logits.copy()
    want[0, 0, ~allowed[2]] = want[2, 0, ~allowed[0]] = -np.inf
    np.testing.assert_array_equal(got, want)


def test_many_masks_take_several_calls() -> None:
    rows = [[RowMask(slot, np.full(2, slot, np.int32)) for slot in range(6)], []]
    calls = list(controls.mask_calls(rows, 40, 9))
    assert [call.shape for call in calls] == [(2, MASK_ROWS, 3)] * 2
    assert np.concatenate(calls, axis=1)[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
    assert (np.concatenate(calls, axis=1)[1, :, 0] == 9).all()
