"""Random workloads on the real scheduler: no request reads bytes that are not its own prefix, no
page is lost, and every request ends with the tokens that the device emitted."""

from __future__ import annotations

import pytest

from serving.replay import Summary, run_workloads

BATCH = 50


@pytest.mark.parametrize("seed", range(0, 400, BATCH))
def test_random_workloads_are_sound(seed: int):
    summary = run_workloads(BATCH, seed)
    assert summary == Summary(workloads=BATCH, steps=summary.steps)
    assert summary.steps > BATCH


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 20_000, 1000))
def test_many_random_workloads_are_sound(seed: int):
    assert run_workloads(1000, seed).first is None
