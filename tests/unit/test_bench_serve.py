"""The load of `scripts/bench_serve.py`, and its summary."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import bench_serve
from serve_bench.load import Arrival, Sample, Workload, arrivals, run
from serve_bench.report import Goal, row, summary

from tests.server.harness import fake_load, serving

WORKLOAD = Workload(prompt_tokens=(4, 9), new_tokens=(2, 6), shared_tokens=3, vocab=50, seed=7)


def test_the_same_seed_gives_the_same_load_of_the_rate_that_was_asked_for():
    load = list(arrivals(WORKLOAD, 50.0, 40.0))
    assert load == list(arrivals(WORKLOAD, 50.0, 40.0))
    assert len(load) == pytest.approx(2000, rel=0.1)
    gaps = np.diff([arrival.at_s for arrival in load])
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)  # as of a Poisson process
    assert len({arrival.prompt[:3] for arrival in load}) == 1
    assert {len(arrival.prompt) for arrival in load} == set(range(4, 10))
    assert {arrival.new_tokens for arrival in load} == set(range(2, 7))
    assert load[0].at_s != next(arrivals(WORKLOAD, 51.0, 40.0)).at_s


async def test_a_load_is_sent_without_waiting_and_every_end_is_noted():
    load = [
        Arrival(at_s=0.0, prompt=(1, 2, 3), new_tokens=5, cancel_after=None),
        Arrival(at_s=0.1, prompt=(1, 2), new_tokens=900, cancel_after=3),
        Arrival(at_s=0.1, prompt=(4, 5), new_tokens=10**6, cancel_after=None),
    ]
    async with serving(fake_load(num_pages=500, max_context_tokens=1000)) as harness:
        done, left, refused = await run(harness.address, load, "x")
        await harness.until_idle()
    assert (done.status, done.tokens, done.prompt_tokens) == ("OK", 5, 3)
    assert done.first_token_s is not None
    assert done.end_s is not None
    assert 0 < done.first_token_s <= done.end_s
    assert done.token_s == pytest.approx((done.end_s - done.first_token_s) / 4)
    assert left.status == "CANCELLED"
    assert 3 <= left.tokens < 900
    assert (refused.status, refused.tokens, refused.first_token_s) == ("INVALID_ARGUMENT", 0, None)


def test_the_summary_counts_what_kept_to_the_goal():
    def sample(status: str, first_s: float | None, end_s: float | None, tokens: int) -> Sample:
        return Sample(at_s=1.0, status=status, prompt_tokens=10, cached_tokens=5, tokens=tokens,
                      first_token_s=first_s, end_s=end_s)  # fmt: skip

    samples = [
        sample("OK", 0.1, 0.5, 5),
        sample("OK", 0.3, 0.4, 2),  # late
        sample("OK", 0.1, 1.0, 2),  # slow
        sample("CANCELLED", 0.1, None, 3),
        sample("RESOURCE_EXHAUSTED", None, None, 0),
    ]
    line = summary(2.5, samples, Goal(first_token_s=0.2, token_s=0.2))
    assert line["statuses"] == {"OK": 3, "CANCELLED": 1, "RESOURCE_EXHAUSTED": 1}
    assert line["wall_s"] == 2.0
    assert line["goodput"] == 0.5
    assert line["tokens_per_s"] == 6.0
    assert line["reused_share"] == 0.5
    assert line["first_token_ms"]["p50"] == pytest.approx(100)
    assert line["token_ms"]["p50"] == pytest.approx(100)
    assert row(line).split()[:4] == ["2.5", "5", "3", "2"]
    nothing = summary(1.0, samples[4:], Goal(first_token_s=1, token_s=1))
    assert math.isnan(float(row(nothing).split()[5]))


def test_a_written_report_is_shown_and_bad_ends_are_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "serve.jsonl"
    line = summary(1.0, [], Goal(first_token_s=1, token_s=1))
    for statuses, code in (({"OK": 3}, 0), ({"OK": 3, "INTERNAL": 1}, 1)):
        file.write_text(json.dumps(line | {"sent": 4, "statuses": statuses}) + "\n")
        assert bench_serve.main(["--report", str(file)]) == code
        assert "goodput" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        bench_serve.main(["--prompt-tokens", "9:4"])
