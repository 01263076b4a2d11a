"""Random workloads on the real scheduler: no request reads bytes that are not its own prefix, no
page is lost, and every request ends with the tokens that the device emitted."""

from __future__ import annotations

import pytest

from serving.replay import RECORDED, SERVED, Choices, Summary, run_workloads

BATCH = 50
CHOICES = {"recorded": RECORDED, "served": SERVED}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(one * BATCH, marks=pytest.mark.slow) for one in (1, 2))]
)
def test_random_workloads_are_sound(seed: int, choices: Choices):
    summary = run_workloads(BATCH, seed, choices)
    assert summary == Summary(workloads=BATCH, steps=summary.steps)
    assert summary.steps > BATCH


@pytest.mark.slow
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
@pytest.mark.parametrize("seed", range(10_000, 15_000, 1000))
def test_many_random_workloads_are_sound(seed: int, choices: Choices):
    assert run_workloads(1000, seed, choices).first is None
