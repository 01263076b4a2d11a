"""What `scripts/bench_reuse.py` counts and prints. The server itself is not started here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.reuse_bench.report import Case, table
from scripts.reuse_bench.workloads import WORKLOADS, new_tokens

ROOT = Path(__file__).parents[2]


def test_new_tokens_are_those_that_no_earlier_request_computed():
    first = ((1, 2, 3), (4, 5))
    assert new_tokens([first]) == 3
    assert new_tokens([first, first]) == 3 + 1  # the last token's logits are needed
    # 1 to 4 were computed; 5 was only sampled.
    assert new_tokens([first, ((1, 2, 3, 4, 5, 6), ())]) == 3 + 2
    assert new_tokens([first, ((1, 2, 9), ()), ((1, 2, 9, 3), ()), ((2, 3), ())]) == 3 + 1 + 1 + 2


def test_workloads_are_the_same_for_a_seed_and_have_dialogues_of_equal_length():
    for make in WORKLOADS.values():
        workload = make(3)
        assert workload == make(3)
        assert workload != make(4)
        assert len({len(dialogue) for dialogue in workload.dialogues}) == 1


def test_table_shows_shares_and_answers_that_differ():
    case = Case(
        workload="w", configuration="c", options=(), clients=2, num_requests=3, prompt_tokens=4000,
        cached_tokens=3000, new_tokens=500, num_different=1, seconds=2.0,
    )  # fmt: skip
    _, line = table([case]).splitlines()
    assert line.split() == [
        *("w", "2", "c", "4,000", "1,000", "25.0%", "12.5%", "1", "differ", "2.0")
    ]


def test_plot_without_matplotlib_is_one_clear_error_before_anything_starts(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)\n"
    )
    done = subprocess.run(
        [sys.executable, "scripts/bench_reuse.py", "--plot", str(tmp_path / "out.svg")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("bench_reuse.py: --plot needs matplotlib")
    assert len(done.stderr.splitlines()) == 1
