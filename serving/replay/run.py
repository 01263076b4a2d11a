"""Replay a trace and count what differs from its answers, and what the content model objects to."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

from k3jax.config import ConfigError
from serving.replay.answers import Answers, EntryName, Mismatch, compare
from serving.replay.driver import Driver
from serving.replay.generate import generate
from serving.replay.setup import RECORDED, Choices, set_up
from serving.replay.trace import Complete, Schedule, Step, Trace
from serving.replay.violations import Violation
from serving.request import InvariantError, RequestError

_NO_NAMES: frozenset[EntryName] = frozenset()
# Even a workload that preempts at every other step is done long before.
_MAX_DRAIN_STEPS = 5000


class Report(NamedTuple):
    """Result of one trace.

    Attributes:
      error: why the replay ended early, if it did.
    """

    mismatches: tuple[Mismatch, ...]
    violations: tuple[Violation, ...]
    num_steps: int
    error: str | None = None

    @property
    def first(self) -> str | None:
        """The first thing that is wrong, for people."""
        found = (*self.mismatches[:1], *self.violations[:1])
        return self.error if self.error or not found else str(found[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Result of random workloads.

    Attributes:
      leaks: workloads that end with pages that are not free.
      stuck: workloads in which a request never ends.
      errors: workloads that ended early.
      first: seed of the first workload with any of these, and what is wrong.
    """

    workloads: int
    steps: int
    violations: int = 0
    leaks: int = 0
    stuck: int = 0
    errors: int = 0
    first: str | None = None

    @property
    def is_clean(self) -> bool:
        return not (self.violations or self.leaks or self.stuck or self.errors)


def replay(trace: Trace) -> Report:
    """Carry out the operations of a trace and compare the answers.

    Entries become visible when the step that wrote them completes. The recording has them one half
    step earlier, so what it registers or drops at a `schedule` is expected at its `complete`.
    """
    try:
        driver = Driver(set_up(trace.config))
    except ConfigError as error:
        return Report((), (), 0, str(error))
    mismatches: list[Mismatch] = []
    later: collections.deque[Answers] = collections.deque()
    for index, item in enumerate(trace.items):
        try:
            answers = driver.apply(item.op)
        except (RequestError, InvariantError) as error:
            problem = f"op {index}: {error}"
            return Report(tuple(mismatches), tuple(driver.violations), driver.num_steps, problem)
        expected = item.expect or Answers()
        if isinstance(item.op, Schedule):
            later.append(expected)
            expected = dataclasses.replace(expected, registered=None, dropped=None, entries=None)
        elif isinstance(item.op, Complete):
            expected = _delayed(expected, later.popleft(), later)
        mismatches += compare(index, answers, expected)
    return Report(tuple(mismatches), tuple(driver.violations), driver.num_steps)


def run_workloads(count: int, seed: int, choices: Choices = RECORDED) -> Summary:
    """Run random workloads; workload `i` is `generate(seed + i)`."""
    summary = Summary(workloads=count, steps=0)
    for one in range(seed, seed + count):
        summary = _add_workload(summary, one, choices)
    return summary


def run_to_end(trace: Trace, choices: Choices = RECORDED) -> tuple[Report, bool, int]:
    """Carry out a trace, then step until every request has ended.

    Returns:
      The report, whether all requests ended, and how many pages are not free in the end.
    """
    driver = Driver(set_up(trace.config, choices))
    problem = None
    is_done = False
    try:
        for item in trace.items:
            driver.apply(item.op)
        is_done = _drain(driver)
    except (RequestError, InvariantError) as error:
        problem = f"{type(error).__name__}: {error}"
    driver.check_outputs()
    report = Report((), tuple(driver.violations), driver.num_steps, problem)
    return report, is_done, driver.num_lost_pages


def _drain(driver: Driver) -> bool:
    """Step until all is done; returns whether it is."""
    while driver.num_open:
        driver.apply(Complete())
    for _ in range(_MAX_DRAIN_STEPS):
        if driver.is_idle:
            return True
        before = driver.num_steps
        driver.apply(Step())
        if driver.num_steps == before:
            return False  # nothing is in flight, and nothing can go on
    return False


def _add_workload(summary: Summary, seed: int, choices: Choices) -> Summary:
    report, is_done, num_lost = run_to_end(generate(seed), choices)
    has_error = report.error is not None
    is_stuck = not is_done and not has_error
    is_leaking = is_done and num_lost > 0
    first = report.first
    if first is None and is_stuck:
        first = "a request never ends"
    elif first is None and is_leaking:
        first = f"{num_lost} pages are not free in the end"
    if summary.first is None and first is not None:
        first = f"seed {seed}: {first}"
    return dataclasses.replace(
        summary,
        steps=summary.steps + report.num_steps,
        violations=summary.violations + len(report.violations),
        leaks=summary.leaks + is_leaking,
        stuck=summary.stuck + is_stuck,
        errors=summary.errors + has_error,
        first=summary.first or first,
    )


def _delayed(
    expected: Answers, scheduled: Answers, still_open: collections.deque[Answers]
) -> Answers:
    """Expectation of a `complete`, with the entries of its own `schedule` but no later ones."""
    if expected.entries is None:
        return expected
    ahead = sum(len(one.registered or ()) - len(one.dropped or ()) for one in still_open)
    return dataclasses.replace(
        expected,
        registered=(expected.registered or _NO_NAMES) | (scheduled.registered or _NO_NAMES),
        dropped=(expected.dropped or _NO_NAMES) | (scheduled.dropped or _NO_NAMES),
        entries=expected.entries - ahead,
    )
