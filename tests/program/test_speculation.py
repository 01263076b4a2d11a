"""Drafts never change greedy tokens, whoever proposes them (KF-S02, S03, S05, S06)."""

from __future__ import annotations

import dataclasses
import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from k3jax.buckets import bucket_table
from k3jax.cache_spec import cache_spec
from k3jax.compile import CompileCounter
from k3jax.config import EngineConfig
from k3jax.paged_model import PagedModel
from k3jax.step import serving_step
from serving.engine import Engine
from serving.executor import Executor
from serving.page_table.alignment import PageGeometry, align
from serving.plan import Output
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits, ngram
from serving.scheduler.state import preempt
from serving.stopping import StopMatcher
from serving.tokenizer import Tokenizer
from tests import oracle, tiny
from tests.fakes import SchedulerDriver
from tests.masked import allowed, answers, constrained
from tests.models import StepExecutor, open_model, program_of

CFG = tiny.short_config()
NUM_DRAFTS, NUM_PAGES, MAX_TOKENS = 3, 26, 30
# Around the page of 40 tokens and the chunk of 64.
LENGTHS = (1, 7, 39, 40, 41, 64, 65, 80)
Propose = Callable[[Sequence[int], int], tuple[int, ...]]


@functools.cache
def engine(num_drafts: int) -> EngineConfig:
    return EngineConfig(
        dtype="float32", max_rows=4, max_context_tokens=120, max_prefill_tokens=64,
        max_prefill_rows=2, num_drafts=num_drafts,
    )  # fmt: skip


@functools.cache
def geometry() -> PageGeometry:
    return align(cache_spec(CFG, tp=1, dtype="float32"), unit_tokens=8, kernel_tokens=8)


@functools.cache
def model() -> PagedModel:
    """With the programs of steps with drafts and without."""
    page_tokens = geometry().page_tokens
    program = program_of(CFG, page_tokens=page_tokens, num_pages=NUM_PAGES)
    buckets = {*bucket_table(engine(0), page_tokens=page_tokens)}
    buckets |= {*bucket_table(engine(NUM_DRAFTS), page_tokens=page_tokens)}
    return open_model(program, sorted(buckets), make_step=serving_step)


def driver(num_drafts: int, num_pages: int = NUM_PAGES) -> SchedulerDriver:
    limits = make_limits(
        engine(num_drafts), geometry(), num_pages=num_pages, vocab_size=CFG.vocab_size
    )
    return SchedulerDriver(limits, StepExecutor(model()), geometry(), num_pages)


def request(index: int, *, temperature: float = 0.0) -> Request:
    rng = np.random.default_rng(100 + index)
    return Request(
        request_id=f"r{index}",
        prompt=tuple(rng.integers(0, CFG.vocab_size, LENGTHS[index]).tolist()),
        sampling=SamplingParams(
            temperature=temperature, top_k=20, top_p=0.9, seed=index, max_tokens=MAX_TOKENS
        ),
        eos_token_ids=(),
    )


@functools.cache
def plain(index: int) -> tuple[int, ...]:
    """Tokens of a request alone, without drafts."""
    alone = driver(0)
    alone.submit(request(index))
    alone.finish()
    return alone.tokens(f"r{index}")


@functools.cache
def _answers() -> dict[tuple[int, ...], tuple[int, ...]]:
    """Prompt and answer of each request, by its prompt."""
    return {request(i).prompt: request(i).prompt + plain(i) for i in range(len(LENGTHS))}


def right(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    known = tuple(tokens)
    for whole in _answers().values():
        if whole[: len(known)] == known:
            return whole[len(known) : len(known) + max(0, num_drafts)]
    raise AssertionError("the tokens so far are those of no request")


def wrong(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    return tuple((token + 1) % CFG.vocab_size for token in right(tokens, num_drafts))


def mixed(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Right up to a place that changes from step to step, and now and then nothing."""
    rng = np.random.default_rng(len(tokens))
    drafts = right(tokens, min(num_drafts, int(rng.integers(0, NUM_DRAFTS + 1))))
    return tuple(t if rng.random() < 0.7 else (t + 1) % CFG.vocab_size for t in drafts)


@pytest.mark.parametrize(
    "propose",
    [right, mixed, *(pytest.param(one, marks=pytest.mark.slow) for one in (wrong, ngram.propose))],
)
def test_kf_s03_greedy_tokens_are_those_without_drafts_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, propose: Propose
) -> None:
    wanted = [plain(index) for index in range(len(LENGTHS))]
    monkeypatch.setattr(ngram, "propose", propose)
    together = driver(NUM_DRAFTS)
    free = together.state.table.num_free
    for index in range(len(LENGTHS)):
        together.submit(request(index))
    together.finish(lookahead=1)
    assert [together.tokens(f"r{index}") for index in range(len(LENGTHS))] == wanted
    assert together.state.table.num_free == free
    steps = max(len(together.outputs[f"r{index}"]) for index in range(len(LENGTHS)))
    if propose is right:  # one output for the prompt, then 1 + NUM_DRAFTS tokens each
        assert steps <= 2 + MAX_TOKENS // (1 + NUM_DRAFTS)
    if propose is wrong:
        assert steps == MAX_TOKENS


def test_preempted_requests_with_drafts_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "propose", mixed)
    crowded = driver(NUM_DRAFTS, 1 + 2 * geometry().num_state_pages + 4)
    for index in (6, 7):
        crowded.submit(request(index))
    crowded.finish(lookahead=1)
    assert crowded.state.num_preemptions > 0
    assert [crowded.tokens(f"r{index}") for index in (6, 7)] == [plain(6), plain(7)]


def repeat_newest(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Drafts that sampling sometimes takes and that depend on where a step begins."""
    return tuple(tokens[-1:] * max(0, num_drafts))


def sampled_alone(index: int) -> tuple[int, ...]:
    """Tokens of a request with a temperature, alone, with drafts."""
    solo = driver(NUM_DRAFTS)
    solo.submit(request(index, temperature=1.0))
    solo.finish()
    return solo.tokens(f"r{index}")


def test_kf_v15_sampled_tokens_do_not_depend_on_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "propose", repeat_newest)
    alone = [sampled_alone(index) for index in (6, 7)]
    for keep in range(1, MAX_TOKENS, 4):
        again = driver(NUM_DRAFTS)
        for index in (6, 7):
            again.submit(request(index, temperature=1.0))
        while len(again.tokens("r7")) < keep:
            again.step()
        again.state = preempt(again.state, "r7")
        again.finish()
        assert [again.tokens(f"r{index}") for index in (6, 7)] == alone
        assert again.state.num_preemptions == 1


def test_sampled_tokens_do_not_depend_on_the_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "propose", repeat_newest)
    alone = [sampled_alone(index) for index in (2, 5)]
    together = driver(NUM_DRAFTS)
    for index in range(len(LENGTHS)):
        together.submit(request(index, temperature=1.0))
    together.finish()
    assert [together.tokens(f"r{index}") for index in (2, 5)] == alone


ASKED: dict[int, dict[str, Any]] = {
    2: {"presence_penalty": -2.0, "frequency_penalty": 0.9, "logprobs": 2},
    5: {"repetition_penalty": 0.5, "min_tokens": 7, "stop_token_ids": (*range(0, 160, 3),)},
}


def asking(index: int) -> Request:
    """A request, with more than temperature if it is one of those."""
    plain = request(index)
    sampling = dataclasses.replace(plain.sampling, **ASKED.get(index, {}))
    return dataclasses.replace(plain, sampling=sampling)


def test_penalties_and_log_probabilities_hold_within_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {}
    for index in range(len(LENGTHS)):
        runs[index] = driver(0)
        runs[index].submit(asking(index))
        runs[index].finish()
    wanted = [runs[index].tokens(f"r{index}") for index in range(len(LENGTHS))]
    answers = [request(index).prompt + wanted[index] for index in range(len(LENGTHS))]

    def propose(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
        known = tuple(tokens)
        whole = next(one for one in answers if one[: len(known)] == known)
        drafts = whole[len(known) : len(known) + max(0, num_drafts)]
        cut = len(known) % (NUM_DRAFTS + 1)  # from there on they are wrong
        return tuple(t if i < cut else (t + 1) % CFG.vocab_size for i, t in enumerate(drafts))

    monkeypatch.setattr(ngram, "propose", propose)
    together = driver(NUM_DRAFTS)
    for index in range(len(LENGTHS)):
        together.submit(asking(index))
    together.finish(lookahead=1)
    assert [together.tokens(f"r{index}") for index in range(len(LENGTHS))] == wanted
    assert together.state.stats.taken_drafts > len(LENGTHS)
    assert all(wanted[index] != plain(index)[: len(wanted[index])] for index in ASKED)
    assert len(wanted[5]) > 7
    told, alone = (
        [one for output in one.outputs["r2"] for one in output.logprobs]
        for one in (together, runs[2])
    )
    assert [one.top_ids for one in told] == [one.top_ids for one in alone]
    np.testing.assert_allclose([one.chosen for one in told], [one.chosen for one in alone],
                               atol=1e-4)  # fmt: skip


def test_an_answer_ends_inside_a_block_where_its_stop_string_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "propose", right)
    answer = plain(5)
    tokenizer = Tokenizer(
        vocab=tuple(f"<{token}>".encode() for token in range(CFG.vocab_size)),
        control_tokens={}, eos_token_id=None, encode=list, max_token_chars=5,
    )  # fmt: skip
    for place in (6, 7, 8):  # blocks have four tokens
        stop = f"{answer[place - 1]}><{answer[place]}"
        end = next(i for i in range(1, MAX_TOKENS) if answer[i - 1 : i + 1] == (
            answer[place - 1 : place + 1])) + 1  # fmt: skip
        sampling = dataclasses.replace(request(5).sampling, stop=(stop,))
        one = driver(NUM_DRAFTS)
        engine = Engine(Executor(model()), one.limits, [one.state.table])
        engine.start()
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        matcher = StopMatcher(tokenizer, sampling)
        engine.submit(
            dataclasses.replace(request(5), sampling=sampling), outputs.put, matcher=matcher
        ).result(30)
        got = [outputs.get(timeout=30)]
        while got[-1].finish_reason is None:
            got.append(outputs.get(timeout=30))
        engine.stop()
        assert engine.join(30)
        assert tuple(token for output in got for token in output.token_ids) == answer[:end]
        assert (got[-1].finish_reason, got[-1].matched_stop) == ("stop", stop)
        assert got[-1].completion_tokens == end
        assert any(len(output.token_ids) > 1 for output in got)
        counts = engine.counts()
        assert counts.free_pages == counts.total_pages


@functools.cache
def masked(index: int) -> tuple[int, ...]:
    """Tokens of a request with a grammar alone, without drafts."""
    (answer,), _ = answers(model(), driver(0), constrained(request(index)))
    return answer


def test_tokens_under_a_grammar_are_the_likeliest_of_those_that_may_come() -> None:
    prompt, answer = request(2).prompt, masked(2)
    assert len(answer) == MAX_TOKENS
    params = tiny.program_params(model().program)
    logits = oracle.forward(CFG, params, np.array(prompt + answer))[0][len(prompt) - 1 :]
    for place, token in enumerate(answer):
        may_come = allowed(answer[:place], CFG.vocab_size)
        assert may_come[token]
        assert logits[place][token] > logits[place][may_come].max() - 1e-4


@pytest.mark.parametrize("num_drafts", [0, NUM_DRAFTS])
def test_answers_under_a_grammar_survive_neighbours_with_drafts_and_preemptions(
    monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    every = [plain(index) for index in range(len(LENGTHS))]  # what `mixed` knows
    wanted = [masked(2), every[7], masked(6), every[5]]
    assert wanted[0] != every[2]
    monkeypatch.setattr(ngram, "propose", mixed)  # and fails for answers that it does not know
    asked = [constrained(request(2)), request(7), constrained(request(6)), request(5)]
    counter = CompileCounter()
    assert answers(model(), driver(num_drafts), *asked)[0] == wanted
    crowded = driver(num_drafts, 1 + 2 * geometry().num_state_pages + 4)
    together, num_preemptions = answers(model(), crowded, *asked)
    assert together == wanted
    assert num_preemptions > 0
    assert counter.count == 0


def test_ngrams_propose_what_followed_last() -> None:
    assert ngram.propose([1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3], 2) == (7, 5)
    assert ngram.propose([4, 8, 6, 4, 8], 5) == (6, 4, 8)  # no further than what is known
    assert ngram.propose([1, 2, 3, 4], 3) == ()
    assert ngram.propose([5], 3) == ()
    assert ngram.propose([7, 7, 7, 7], 2) == (7,)
    # 256 and 1 share bytes, but not on the border of a token.
    assert ngram.propose([0x01020304, 0x05060708, 9, 0x02030405, 0x06070801, 0x02030405], 2) == ()
