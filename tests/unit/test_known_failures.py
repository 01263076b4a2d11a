"""The table of docs/known-failures.md and the tests agree."""

from __future__ import annotations

import collections
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "known-failures.md"
NUM_IDS = {"C": 20, "K": 11, "M": 10, "S": 10, "V": 22, "L": 5, "H": 4}


def test_every_requirement_has_tests_that_exist_and_every_named_test_is_in_its_row() -> None:
    found = {
        f"{file.relative_to(TESTS)}::{name}"
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    named = collections.defaultdict(set)
    for test in found:
        if of_id := re.search(r"::test_kf_(\w\d\d)_", test):
            named[of_id[1].upper()].add(test)
    rows = {
        id: set(re.findall(r"`([\w/.]+::\w+)`", tests))
        for id, tests in re.findall(r"^\| KF-(\w+) \| [^|]+ \| (.+) \|$", TABLE.read_text(), re.M)
    }
    assert list(rows) == [
        f"{kind}{n:02}" for kind, most in NUM_IDS.items() for n in range(1, 1 + most)
    ]
    assert not [id for id, tests in rows.items() if not tests]
    assert not set.union(*rows.values()) - found
    assert {
        id: tests - rows.get(id, set()) for id, tests in named.items() if tests - rows[id]
    } == {}
