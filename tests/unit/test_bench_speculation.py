"""What `scripts/bench_speculation.py` counts and prints, and a small run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from embedded_training.tokenizer import NUM_RANKS, NUM_RESERVED, write_tokenizer
from speculation_bench import report
from speculation_bench.case import Case, Workload
from speculation_bench.measure import CaseFailed, Played, Step, play
from speculation_bench.prompts import LOW_ENTROPY, MAX_CHARS, high_entropy
from speculation_bench.variants import Variant

from k3jax.draft.config import DraftConfig
from k3jax.weights import synthetic
from tests import tiny
from tests.fakes import (
    FakeDevices,
    FakeExecutor,
    fake_geometry,
    fake_limits,
    fake_request,
    solo_tokens,
)
from tests.unit.test_draft_config import SMALL_MLA

ROOT = Path(__file__).parents[2]
GREEDY = Workload(name="low", prompts=((1, 2, 3), (4, 5)), temperature=0.0, new_tokens=4)


def played(*taken: int, tokens: tuple[tuple[int, ...], ...] = ((6, 7, 8, 9),) * 2) -> Played:
    """A round of steps with three drafts, half a second each, of one request."""
    steps = tuple(Step(3, count, 0.5 * i, i > 0) for i, count in enumerate(taken))
    return Played(tokens=tokens, decoded_tokens=6, seconds=2.0, steps=steps)


def case(drafter: Any = "dspark", num_drafts: int = 3, **fields: Any) -> Case:
    variant = Variant(drafter=drafter, num_drafts=num_drafts)
    return Case(workload=GREEDY, variant=variant, **fields)


def test_a_line_counts_the_drafts_that_stay_and_the_token_behind_them() -> None:
    line = case(rounds=[played(0, 3, 2), played(1)], device_s=0.25).to_json()
    assert line["accepted_per_step"] == 1 + (0 + 3 + 2 + 1) / 4
    assert line["tried_by_place"] == [4, 4, 4]
    assert line["taken_by_place"] == [3, 2, 1]
    assert line["samples"] == [3.0, 3.0]
    assert (line["step_ms"], line["device_ms"]) == (500, 250)
    assert line["unsteady_rounds"] == 0


def test_kf_s06_an_answer_that_parts_is_wrong_unless_the_logits_are_close() -> None:
    other = ((6, 7, 8, 9), (6, 5, 8, 9))
    asked = []
    for gap, is_wrong in ((0.001, False), (0.5, True), (None, True)):
        parted = case(rounds=[played(0, tokens=other)])
        parted.compare(((6, 7, 8, 9),) * 2, lambda *place, gap=gap: asked.append(place) or gap)
        line = parted.to_json()
        assert line["different"] == [{"prompt": 1, "place": 1, "gap": gap}]
        assert report.has_failed([line]) == is_wrong
    assert asked == [(1, 1, 5)] * 3


def test_tables_compare_with_the_line_without_drafts_and_show_failures() -> None:
    plain = case("none", 0, rounds=[played(0)], device_s=0.1)
    drafting = case(rounds=[played(1, 2)], device_s=0.125)
    failing = case("ngram", 4, failure="CaseFailed: out of time")
    lines = [one.to_json() for one in (plain, drafting, failing)]
    text = report.tables(lines)
    assert "| dspark 3 | 2.50 | 3 | 1.00 | 500.00 | 125.00 | 1.25 | 2.00 |" in text
    assert "| dspark 3 | 100% | 50% | 0% |" in text
    assert text.endswith("FAILED low/ngram 4: CaseFailed: out of time")
    assert report.has_failed(lines)
    assert not report.has_failed(lines[:2])


def test_prompts_fit_and_are_the_same_every_time() -> None:
    assert len(LOW_ENTROPY) == len(high_entropy()) == 16
    assert high_entropy() == high_entropy() != high_entropy(1)
    assert all(8 <= len(t) <= MAX_CHARS and t.isascii() for t in (*LOW_ENTROPY, *high_entropy()))


def test_an_engine_answers_and_only_steps_behind_the_first_token_count() -> None:
    geometry = fake_geometry()
    limits = fake_limits(geometry, max_rows=1, max_prefill_rows=1)
    built: Any = SimpleNamespace(
        executor=FakeDevices(FakeExecutor(geometry)), limits=limits, geometry=geometry,
        num_pages=100,
    )  # fmt: skip
    got, row = play(
        built, GREEDY.prompts, temperature=0.0, max_tokens=4, until_s=time.monotonic() + 30
    )
    wanted = [fake_request(prompt=prompt, seed=i) for i, prompt in enumerate(GREEDY.prompts)]
    assert got.tokens == tuple(map(solo_tokens, wanted))
    assert got.decoded_tokens == len(got.steps) == 6
    assert len(got.step_s) == 4
    assert row.start == 4
    with pytest.raises(CaseFailed, match="out of time"):
        play(built, GREEDY.prompts, temperature=0.0, max_tokens=4, until_s=time.monotonic())


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_small_run_writes_a_line_a_case_and_equal_greedy_answers(tmp_path: Path) -> None:
    vocab = {"vocab_size": NUM_RANKS + NUM_RESERVED}
    tiny.write_tiny_checkpoint(tmp_path / "model", **vocab)
    write_tokenizer(tmp_path / "model", 512)
    config = SMALL_MLA | vocab | {"draft_vocab_size": NUM_RANKS + NUM_RESERVED}
    tensors = dict(synthetic.random_tensors(DraftConfig.from_hf(config), seed=1))
    (tmp_path / "draft").mkdir()
    synthetic.write_tensors(tmp_path / "draft", config, tensors)
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "scripts/bench_speculation.py", "--dtype", "float32"),
            *("--model", tmp_path / "model", "--draft", tmp_path / "draft", "--json", out),
            *("--drafts", "2", "--prompts", "1", "--new-tokens", "8", "--repeats", "1"),
            *("--context", "288", "--total-s", "550", "--compile-s", "500"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    variants = ["none", "dspark 2", "dspark 2 adaptive", "ngram 4"]
    wanted = [f"{name} entropy/{variant}" for name in ("low", "high") for variant in variants]
    assert [line["case"] for line in lines] == wanted
    assert all(line["device_ms"] > 0 and line["steps"] for line in lines)
    assert [line.get("different") for line in lines] == [[]] * 4 + [None] * 4
    assert "all equal to those without drafts" in done.stdout
