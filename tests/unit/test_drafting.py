"""How many drafts a request gets."""

from __future__ import annotations

import pytest

from serving.scheduler import drafting


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
