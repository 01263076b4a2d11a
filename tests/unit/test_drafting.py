"""How many drafts a request gets."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from k3jax.config import EngineConfig
from serving import scheduler
from serving.page_table import empty_table
from serving.plan import StepResult
from serving.scheduler import drafting
from tests.fakes import VOCAB_SIZE, fake_geometry, fake_request


def test_more_drafts_are_tried_the_likelier_they_are_and_the_cheaper() -> None:
    def chosen(rate: float, cost: float) -> int:
        return drafting.num_drafts(rate, 1, most=7, cost=cost)

    assert [chosen(rate, 0.2) for rate in (0.1, 0.3, 0.6, 0.8, 0.95)] == [0, 1, 2, 4, 7]
    assert [chosen(0.8, cost) for cost in (0.02, 0.1, 0.3, 0.9)] == [7, 6, 3, 0]
    assert chosen(0.0, 0.0) == 7


@pytest.mark.parametrize("most", [0, 1])
def test_a_request_whose_drafts_do_not_pay_probes_now_and_then(most: int) -> None:
    tried = [drafting.num_drafts(0.1, at, most=most, cost=0.5) for at in range(128)]
    assert [at for at, count in enumerate(tried) if count] == ([0, 32, 64, 96] if most else [])


def test_the_rate_follows_what_was_taken_and_ignores_what_was_not_tried() -> None:
    rate = drafting.FIRST_RATE
    for _ in range(100):
        rate = drafting.updated_rate(rate, 4, 0)
    assert rate < 0.01
    for _ in range(100):
        rate = drafting.updated_rate(rate, 4, 4)
    assert rate > 0.99
    # One of seven taken: two trials, whatever stood behind them.
    assert drafting.updated_rate(0.5, 7, 1) == pytest.approx((16 * 0.5 + 1) / 18)


@pytest.mark.parametrize(("drafter", "last"), [("device", [3, 2, 1, 0]), ("ngram", [1, 1, 1, 0])])
def test_drafts_end_where_the_context_does(
    drafter: Literal["device", "ngram"], last: list[int]
) -> None:
    engine = EngineConfig(
        max_rows=1, max_context_tokens=16, max_prefill_tokens=16, max_prefill_rows=1, num_drafts=3
    )
    limits = scheduler.make_limits(
        engine, fake_geometry(), num_pages=20, vocab_size=VOCAB_SIZE, drafter=drafter
    )
    state = scheduler.initial_state(empty_table(fake_geometry(), 20), limits)
    state = scheduler.submit(state, limits, fake_request(prompt=[7] * 5, max_tokens=11))
    tried = []
    while not scheduler.is_idle(state):
        state, step = scheduler.plan(state, limits)
        assert step is not None
        tried.append(step.rows[0].num_drafts)
        refused = StepResult(
            step_id=step.step_id, tokens=np.array([7], np.int32), finite=np.array([True])
        )
        state, _ = scheduler.commit(state, refused)
    assert tried[-4:] == last
