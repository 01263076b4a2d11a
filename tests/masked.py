"""A grammar that needs no library, and answers of an engine to requests that have it."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence
from typing import cast

import numpy as np

from k3jax.controls import mask_words
from k3jax.paged_model import PagedModel
from serving.engine import Engine
from serving.executor import Executor
from serving.grammars import GrammarMatcher
from serving.plan import Output
from serving.request import Grammar, Request
from tests.fakes import SchedulerDriver

WAIT_S = 60


def constrained(request: Request) -> Request:
    """The request with a grammar."""
    sampling = dataclasses.replace(request.sampling, grammar=Grammar("regex", "a"))
    return dataclasses.replace(request, sampling=sampling)


def allowed(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Which tokens may come after some; a tenth, and others in each place."""
    rng = np.random.default_rng([len(tokens), *tokens[-1:]])
    return rng.random(vocab_size) < 0.1


class Matcher:
    """Does what the engine asks of a `GrammarMatcher`."""

    def __init__(self, vocab_size: int):
        self._tokens: list[int] = []
        self._vocab_size = vocab_size

    def mask(self) -> np.ndarray:
        bits = np.zeros(32 * mask_words(self._vocab_size), np.bool_)
        bits[: self._vocab_size] = allowed(self._tokens, self._vocab_size)
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids


def answers(
    model: PagedModel, driver: SchedulerDriver, *requests: Request
) -> tuple[list[tuple[int, ...]], int]:
    """The answers of an engine to requests together, and how many preemptions there were.

    Args:
      driver: has the limits and the page table.
    """
    engine = Engine(Executor(model), driver.limits, [driver.state.table])
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.start()
    for asked in requests:
        matcher = None
        if asked.sampling.grammar is not None:
            matcher = cast(GrammarMatcher, Matcher(model.program.cfg.vocab_size))
        engine.submit(asked, outputs.put, grammar=matcher).result(WAIT_S)
    tokens: dict[str, tuple[int, ...]] = {asked.request_id: () for asked in requests}
    num_open = len(requests)
    while num_open:
        output = outputs.get(timeout=WAIT_S)
        assert output.error is None
        tokens[output.request_id] += output.token_ids
        num_open -= output.finish_reason is not None
    engine.stop()
    assert engine.join(WAIT_S)
    counts = engine.counts()
    assert counts.free_pages == counts.total_pages
    return list(tokens.values()), counts.preemptions
