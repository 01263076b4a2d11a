"""Reuse by the real program with the embedded model: prompts that share less than one page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.reuse_bench.server import ask, flush, running_server

ANSWER = 8
SMALL = (
    *("--dtype", "float32", "--max-rows", "1", "--page-unit", "128"),
    *("--max-context", "256", "--max-prefill-tokens", "64", "--num-pages", "16"),
)
WIDE = (
    *("--dtype", "float32", "--max-rows", "1", "--page-unit", "6144"),
    *("--max-context", "6144", "--max-prefill-tokens", "2048", "--num-pages", "16"),
)


def tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prompt_that_grows_inside_a_page_reuses_all_its_whole_units(cache_dir: Path):
    prompt = tokens(100, seed=1)
    longer = (*prompt, 7, 8)
    with running_server(*SMALL, "--hash-block-size", "16", "--cache-dir", str(cache_dir)) as stub:
        first = ask(stub, prompt, ANSWER)
        second = ask(stub, longer, ANSWER)
        flush(stub)
        cold = ask(stub, longer, ANSWER)
    assert [one.cached_tokens for one in (first, second, cold)] == [0, 96, 0]
    assert second.token_ids == cold.token_ids


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prompt_that_grows_inside_a_page_reuses_nothing_with_a_key_a_page(cache_dir: Path):
    prompt = tokens(100, seed=1)
    with running_server(*SMALL, "--hash-block-size", "128", "--cache-dir", str(cache_dir)) as stub:
        ask(stub, prompt, ANSWER)
        second = ask(stub, (*prompt, 7, 8), ANSWER)
    assert second.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("options", "cached"),
    [(("--hash-block-size", "6144"), [0, 0, 0, 0]), ((), [0, 4992, 0, 4992])],
    ids=["a_key_a_page", "default"],
)
def test_system_prompt_shorter_than_a_page(
    options: tuple[str, ...], cached: list[int], cache_dir: Path
):
    """5,000 tokens on pages of 6,144: sent alone and then with a question; and, from the beginning,
    with three questions, of which the second finds out that the system prompt is shared."""
    system = tokens(5000, seed=2)
    questions = [(*system, *tokens(300, seed=seed)) for seed in (3, 4, 5)]
    with running_server(*WIDE, *options, "--cache-dir", str(cache_dir)) as stub:
        alone = ask(stub, system, ANSWER)
        after_alone = ask(stub, questions[2], ANSWER)
        flush(stub)
        first, second, third = (ask(stub, question, ANSWER) for question in questions)
    got = [one.cached_tokens for one in (alone, after_alone, second, third)]
    assert (first.cached_tokens, got) == (0, cached)
    assert after_alone.token_ids == third.token_ids
