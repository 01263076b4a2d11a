"""Whole models against logits that other implementations produced (tests/data/*/expected.npz)."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from serving.score import Scorer
from tests import tiny
from tests.models import load_golden, relative_error

TOLERANCE = {"k3-tiny": 2e-4, "k3-tiny-mxfp4": 2e-4, "kimi-linear-tiny": 1e-4}
LONGEST = 86  # the longest case, and room for greedy continuations
# Every model on one rank; then meshes, and both ways to split experts. Two processes decode k3-tiny
# by default, see tests/server/test_processes.py.
MESHES = [
    pytest.param("k3-tiny", 1, "ep", marks=pytest.mark.slow),
    ("k3-tiny-mxfp4", 1, "ep"),
    ("kimi-linear-tiny", 1, "ep"),
    pytest.param("k3-tiny", 2, "ep", marks=pytest.mark.slow),
    pytest.param("k3-tiny-mxfp4", 4, "ep", marks=pytest.mark.slow),
    ("kimi-linear-tiny", 4, "tp"),
]


@functools.cache
def scorer(name: str, tp: int, experts: str) -> Scorer:
    loaded = load_golden(name, tp=tp, experts=experts)
    return Scorer(loaded, max_tokens=LONGEST, max_step_tokens=LONGEST, with_decode=True)


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(tiny.DATA / name / "expected.npz") as file:
        return dict(file)


def cases(name: str) -> list[str]:
    keys = expected(name)
    return sorted(k.split(".")[0] for k in keys if k.startswith("len") and k.endswith(".logits"))


@pytest.mark.parametrize("chunk", [None, 16, 17])
@pytest.mark.parametrize(("name", "tp", "experts"), MESHES)
def test_prefill_logits_equal_golden(name: str, tp: int, experts: str, chunk: int | None) -> None:
    want = expected(name)
    errors = {
        case: relative_error(
            scorer(name, tp, experts).score(want[f"{case}.tokens"], chunk=chunk),
            want[f"{case}.logits"],
        )
        for case in cases(name)
    }
    assert errors
    assert max(errors.values()) <= TOLERANCE[name], errors


@pytest.mark.parametrize(("name", "tp", "experts"), MESHES)
def test_decode_logits_equal_golden(name: str, tp: int, experts: str) -> None:
    want = expected(name)
    decodes = [key for key in want if key.startswith("decode.")]
    assert decodes
    for key in decodes:
        case, prefix = key.split(".")[1], int(key.split(".")[2])
        tokens = want[f"{case}.tokens"]
        got = scorer(name, tp, experts).score(tokens, num_decode=len(tokens) - prefix)
        assert relative_error(got[prefix:], want[key]) <= TOLERANCE[name]


@pytest.mark.parametrize(("name", "tp", "experts"), MESHES[:3])
def test_greedy_continuation_equals_golden(name: str, tp: int, experts: str) -> None:
    want = expected(name)
    continuations = [key for key in want if key.startswith("greedy.")]
    assert continuations
    for key in continuations:
        case, ids = key.split(".")[1], want[key]
        prompt = want[f"{case}.tokens"]
        tokens = np.concatenate([prompt, ids]).astype(np.int32)
        # Teacher forcing on the expected ids is greedy decoding as long as every argmax agrees.
        logits = scorer(name, tp, experts).score(tokens, num_decode=len(ids))
        np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1), ids)
