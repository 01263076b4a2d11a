"""What `scripts/soak.py` asks, and what it reads from a server."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # as for the script itself

from soak_test.questions import questions
from soak_test.watch import growth, parse, total


def test_questions_share_prefixes() -> None:
    asked = questions(random.Random(0), list(range(250)) * 20, 30)
    starts = [one.prompt[:150] for one in asked]
    assert max(map(starts.count, starts)) > 3
    assert {one.temperature for one in asked} == {0.0, 1.0}


def test_metrics_and_growth() -> None:
    text = '# HELP x y\nx_total{replica="0",state="held"} 3.0\nx_total{replica="1"} 1e1\nz 2\n'
    values = parse(text)
    assert values['x_total{replica="0",state="held"}'] == 3
    assert total(values, "x_total") == 13
    assert growth([1, 1, 10, 10, 10, 10, 11, 11]) == pytest.approx(0.1)
    assert growth([1.0]) == 0
