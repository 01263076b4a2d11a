"""What a request asks for besides temperature, through scheduler and device: the answers are those
of a float64 model with the definitions written out, whatever the company."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest

from k3jax.compile import CompileCounter
from serving.page_table import CachePolicy
from serving.plan import Output
from serving.request import Request, SamplingParams
from tests import oracle, tiny
from tests.fakes import SchedulerDriver
from tests.models import StepExecutor
from tests.program.test_serving_loop import CFG, PROMPT_LENGTHS, driver, geometry, model, solo
from tests.program.test_serving_loop import request as plain_request

MAX_TOKENS = 12
# Of each prompt of the serving loop's tests: what it asks for.
ASKED: dict[int, dict[str, Any]] = {
    1: {"presence_penalty": -2.0, "frequency_penalty": 0.4, "logprobs": 3},
    2: {"repetition_penalty": 0.4, "logprobs": 0},
    3: {"logit_bias": ((7, 2.5), (11, -100.0)), "frequency_penalty": -0.7, "logprobs": 20},
    4: {"min_tokens": 6, "stop_token_ids": tuple(range(0, CFG.vocab_size, 2)), "logprobs": 2},
    7: {"prompt_logprobs": 4, "repetition_penalty": 0.6, "logprobs": 1},
}
TOLERANCE = 1e-4


def request(index: int, *, temperature: float = 0.0, max_tokens: int = MAX_TOKENS) -> Request:
    base = plain_request(index)
    sampling = SamplingParams(
        temperature=temperature, seed=index, max_tokens=max_tokens, **ASKED[index]
    )
    return Request(
        request_id=base.request_id, prompt=base.prompt, sampling=sampling, eos_token_ids=(1,)
    )


def run(*indices: int, pages: int | None = None, **settings: Any) -> SchedulerDriver:
    """Requests together, one step ahead."""
    one = driver(pages) if pages else driver()
    for index in indices:
        one.submit(request(index, **settings))
    one.finish(lookahead=1)
    return one


@functools.cache
def logits_of(tokens: tuple[int, ...]) -> np.ndarray:
    """Logits `[T, V]` of the float64 model."""
    params = tiny.program_params(model().program)
    return oracle.forward(CFG, params, np.array(tokens))[0]


def adjusted(logits: np.ndarray, request: Request, output: tuple[int, ...]) -> np.ndarray:
    sampling, after = request.sampling, logits.copy()
    for token, value in sampling.logit_bias:
        after[token] += value
    if len(output) < sampling.min_tokens:
        after[[*sampling.stop_token_ids, *request.eos_token_ids]] = -math.inf
    for token in {*request.prompt, *output}:
        factor = sampling.repetition_penalty
        after[token] = after[token] / factor if after[token] > 0 else after[token] * factor
    for token in set(output):
        times = output.count(token)
        after[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    return after


def check_logprobs(told: Any, logits: np.ndarray, token: int, count: int) -> None:
    """Compare what was told of one place with the model's own distribution."""
    want = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(told.chosen, want[token], atol=TOLERANCE)
    np.testing.assert_allclose(told.top, np.sort(want)[::-1][:count], atol=TOLERANCE)
    np.testing.assert_allclose(told.top, want[list(told.top_ids)], atol=TOLERANCE)


@pytest.mark.parametrize("index", ASKED)
def test_greedy_answers_and_log_probabilities_are_the_oracles(index: int) -> None:
    asked = request(index)
    sampling = asked.sampling
    alone = run(index)
    tokens = alone.tokens(f"r{index}")
    outputs = alone.outputs[f"r{index}"]
    told = [one for output in outputs for one in output.logprobs]
    logits = logits_of((*asked.prompt, *tokens))[len(asked.prompt) - 1 :]
    assert len(told) == len(tokens)
    for place, token in enumerate(tokens):
        after = adjusted(logits[place], asked, tokens[:place])
        assert after[token] > after.max() - TOLERANCE
        check_logprobs(told[place], logits[place], token, sampling.logprobs or 0)
    if sampling.min_tokens:
        assert sampling.min_tokens < len(tokens) < MAX_TOKENS
        assert alone.finish_reason(f"r{index}") == "stop"
    else:
        assert len(tokens) == MAX_TOKENS
    plain = solo(index, 0.0)
    assert tokens != plain[: len(tokens)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_that_ask_and_such_that_do_not_equal_their_solo_runs(temperature: float) -> None:
    together = driver()
    for index in range(len(PROMPT_LENGTHS)):
        asks = index in ASKED
        make = request if asks else plain_request
        together.submit(make(index, temperature=temperature))
    together.finish(lookahead=1)
    for index in range(len(PROMPT_LENGTHS)):
        if index in ASKED:
            alone = run(index, temperature=temperature)
            assert together.tokens(f"r{index}") == alone.tokens(f"r{index}")
        else:
            assert together.tokens(f"r{index}") == solo(index, temperature)


def test_kf_c13_penalties_survive_a_preemption() -> None:
    crowded = run(3, 2, pages=1 + 2 * geometry().num_state_pages + 4, max_tokens=70)
    assert crowded.state.num_preemptions > 0
    for index in (2, 3):
        assert crowded.tokens(f"r{index}") == run(index, max_tokens=70).tokens(f"r{index}")


def test_what_a_slot_held_before_is_forgotten() -> None:
    one = driver()
    one.submit(request(3))
    one.finish()
    # Nothing ends this answer early, so nothing is banned, though it says min_tokens.
    plain = plain_request(1)
    sampling = dataclasses.replace(plain.sampling, min_tokens=5, frequency_penalty=1e-9)
    one.submit(dataclasses.replace(plain, sampling=sampling))
    one.finish()
    assert one.tokens("r1") == solo(1, 0.0)
    one.submit(dataclasses.replace(plain, request_id="b", sampling=dataclasses.replace(
        plain.sampling, min_tokens=5)))  # fmt: skip
    one.finish()
    assert one.tokens("b") == solo(1, 0.0)


def prompt_logprobs(outputs: list[Output]) -> tuple[Any, ...]:
    """What the first output tells of the prompt; the others tell nothing."""
    first, *others = outputs
    assert not any(output.prompt_logprobs for output in others)
    return first.prompt_logprobs


def test_prompt_log_probabilities_of_a_chunked_prompt_that_could_be_reused() -> None:
    policy = CachePolicy(unit_tokens=8, keep_answer_end=True)
    reusing = driver()
    reusing = SchedulerDriver(
        reusing.limits, StepExecutor(model()), geometry(), reusing.state.table.num_pages, policy
    )
    asked = request(7)  # longer than a chunk
    for name in ("cold", "warm"):
        one = Request(
            request_id=name, prompt=asked.prompt, sampling=asked.sampling, eos_token_ids=()
        )
        reusing.submit(one)
        if name == "warm":  # beside others, whose prompts share its steps
            reusing.submit(plain_request(1))
            reusing.submit(plain_request(5))
        reusing.finish(lookahead=1)
    logits = logits_of(asked.prompt)
    for name in ("cold", "warm"):
        assert reusing.outputs[name][-1].cached_tokens == 0
        told = prompt_logprobs(reusing.outputs[name])
        assert len(told) == len(asked.prompt) - 1
        for place, token in enumerate(asked.prompt[1:]):
            check_logprobs(told[place], logits[place], token, 4)
    again = Request(
        request_id="plain", prompt=asked.prompt,
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1), eos_token_ids=(),
    )  # fmt: skip
    reusing.submit(again)
    reusing.finish()
    assert reusing.outputs["plain"][-1].cached_tokens > 0  # what they computed serves others
    assert not reusing.outputs["plain"][-1].prompt_logprobs


def test_kf_v16_log_probabilities_are_the_models_own_whatever_is_masked() -> None:
    base = plain_request(1)
    first = solo(1, 0.0)[0]
    sampling = SamplingParams(
        temperature=1.0, top_k=1, seed=0, max_tokens=1, logit_bias=((first, -100.0),), logprobs=5
    )
    one = driver()
    one.submit(dataclasses.replace(base, sampling=sampling))
    one.finish()
    (told,) = one.outputs["r1"][-1].logprobs
    logits = logits_of(base.prompt)[-1]
    (token,) = one.tokens("r1")
    assert token == np.argsort(-logits)[1]
    assert told.top_ids[0] == first
    check_logprobs(told, logits, token, 5)


def test_kf_v20_asking_for_anything_compiles_nothing() -> None:
    run(1)
    counter = CompileCounter()
    run(*ASKED, temperature=0.7)
    assert counter.count == 0
