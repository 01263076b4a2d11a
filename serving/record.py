"""A record of all that a scheduler was told, from which its state at any step can be made again.

The scheduler is pure, so its configuration and the calls made to it are enough. A file has one JSON
object a line: the configuration, then the events in order. Each is written before the scheduler
sees it, so the last line is what a scheduler that failed was doing. Files hold prompts and answers
as token ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from k3jax.buckets import Bucket
from serving import page_table, scheduler
from serving.page_table import CachePolicy, InUse, PageGeometry, PageTable, empty_table
from serving.plan import Output, StepPlan, StepResult
from serving.request import Request, RequestError, SamplingParams
from serving.scheduler import Limits, SchedulerState

logger = logging.getLogger(__name__)

FORMAT = 1


class RecordError(Exception):
    """A file is no record that can be read; the message says why."""


class Setup(NamedTuple):
    """Of the scheduler. `num_pages` counts the null page."""

    geometry: PageGeometry
    num_pages: int
    policy: CachePolicy
    limits: Limits


class Submitted(NamedTuple):
    """`scheduler.submit`, which may refuse."""

    request: Request


class Ended(NamedTuple):
    """`scheduler.abort`."""

    request_id: str
    error: RequestError | None = None


class Planned(NamedTuple):
    """`scheduler.plan`, which may find nothing to do."""

    paused: Set[str]


class Committed(NamedTuple):
    """`scheduler.commit`."""

    result: StepResult


class Flushed(NamedTuple):
    """`page_table.reset`, which may refuse."""


type Event = Submitted | Ended | Planned | Committed | Flushed


class Recorder:
    """Writes a record. A file that cannot be written to ends the record, not the engine.

    Args:
      file: where to; None records nothing.
    """

    def __init__(self, file: TextIO | None = None):
        self._file = file

    def write(self, event: Event | Setup) -> None:
        """Add a line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_encode(event), separators=(",", ":")) + "\n")
        except OSError as error:
            logger.error("record_ended", exc_info=error)
            self.close()

    def close(self) -> None:
        """End the record."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a line that could not be written either
                self._file.close()
            self._file = None


def open_recorder(path: Path, table: PageTable, limits: Limits) -> Recorder:
    """Begin a record of a scheduler in a new file.

    Raises:
      OSError: the file exists, or cannot be made.
    """
    file = path.open("x", encoding="utf-8", buffering=1)  # a killed process has written its lines
    recorder = Recorder(file)
    recorder.write(Setup(table.geometry, table.num_pages, table.policy, limits))
    return recorder


def read_record(path: Path) -> tuple[Setup, Iterator[Event]]:
    """Read a record; its events come as the file is read. A line that was cut off is left out.

    Raises:
      RecordError: the file is no record, or one of another version; also raised by the iterator.
      OSError: it cannot be read.
    """
    events = _lines(path)
    first = next(events, None)
    if not isinstance(first, Setup):
        raise RecordError(f"{path} is no record: expected the setup of a scheduler in line 1")
    return first, (event for event in events if not isinstance(event, Setup))


class Moment(NamedTuple):
    """The scheduler after an event.

    Attributes:
      plan: the step that the event planned.
      outputs: of the event.
      refusal: why nothing was done.
    """

    event: Event
    state: SchedulerState
    plan: StepPlan | None = None
    outputs: tuple[Output, ...] = ()
    refusal: RequestError | InUse | None = None


def replay(setup: Setup, events: Iterator[Event]) -> Iterator[Moment]:
    """Do again what a record says. Raises what the scheduler raised, if it failed."""
    limits = setup.limits
    table = empty_table(setup.geometry, setup.num_pages, setup.policy)
    state = scheduler.initial_state(table, limits)
    for event in events:
        match event:
            case Submitted(request):
                try:
                    state = scheduler.submit(state, limits, request)
                    yield Moment(event, state)
                except RequestError as error:
                    yield Moment(event, state, refusal=error)
            case Ended(request_id, error):
                state, output = scheduler.abort(state, request_id, error=error)
                yield Moment(event, state, outputs=() if output is None else (output,))
            case Planned(paused):
                state, plan = scheduler.plan(state, limits, paused=paused)
                yield Moment(event, state, plan=plan)
            case Committed(result):
                state, outputs = scheduler.commit(state, result)
                yield Moment(event, state, outputs=outputs)
            case Flushed():
                try:
                    state = dataclasses.replace(state, table=page_table.reset(state.table))
                    yield Moment(event, state)
                except InUse as error:
                    yield Moment(event, state, refusal=error)


def _encode(event: Event | Setup) -> dict[str, Any]:
    match event:
        case Planned(paused):
            return {"op": "plan", "paused": sorted(paused)} if paused else {"op": "plan"}
        case Committed(result):
            line = {"op": "commit", "step": result.step_id, "tokens": result.tokens.tolist()}
            if not result.finite.all():
                line["not_finite"] = np.flatnonzero(~result.finite).tolist()
            if result.accepted:
                line["accepted"] = result.accepted
            return line
        case Submitted(request):
            return {"op": "submit", "request": dataclasses.asdict(request)}
        case Ended(request_id, error):
            why = None if error is None else [error.status, error.message]
            return {"op": "abort", "id": request_id, "error": why}
        case Flushed():
            return {"op": "flush"}
        case Setup(geometry, num_pages, policy, limits):
            return {
                "op": "setup",
                "format": FORMAT,
                "geometry": dataclasses.asdict(geometry),
                "num_pages": num_pages,
                "policy": dataclasses.asdict(policy),
                "limits": dataclasses.asdict(limits),
            }


def _decode(line: dict[str, Any]) -> Event | Setup:
    """Raises KeyError, TypeError or ValueError for what `_encode` did not write."""
    match line["op"]:
        case "plan":
            return Planned(frozenset(line.get("paused", ())))
        case "commit":
            finite = np.ones(len(line["tokens"]), np.bool_)
            finite[line.get("not_finite", [])] = False
            result = StepResult(
                step_id=line["step"],
                tokens=np.array(line["tokens"], np.int32),
                finite=finite,
                accepted=tuple(tuple(drafts) for drafts in line.get("accepted", ())),
            )
            return Committed(result)
        case "submit":
            values = line["request"]
            sampling = _make(SamplingParams, values["sampling"], "stop_token_ids")
            request = values | {"sampling": sampling}
            return Submitted(_make(Request, request, "prompt", "eos_token_ids"))
        case "abort":
            return Ended(line["id"], RequestError(*line["error"]) if line["error"] else None)
        case "flush":
            return Flushed()
        case "setup" if line["format"] == FORMAT:
            limits = line["limits"]
            buckets = [Bucket(**bucket) for bucket in limits["buckets"]]
            return Setup(
                geometry=PageGeometry(**line["geometry"]),
                num_pages=line["num_pages"],
                policy=CachePolicy(**line["policy"]),
                limits=_make(Limits, limits | {"buckets": buckets}, "buckets"),
            )
        case _:
            raise ValueError(f"unknown op or format: {line['op']!r}")


def _make[T](kind: Callable[..., T], values: dict[str, Any], *tuples: str) -> T:
    """Make a value from its fields; lists of `tuples` become tuples, which JSON does not have."""
    return kind(**values | {name: tuple(values[name]) for name in tuples})


def _lines(path: Path) -> Iterator[Event | Setup]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield _decode(json.loads(line))
            except (KeyError, TypeError, ValueError, RequestError) as error:
                raise RecordError(f"{path}, line {number} is not understood: {error!r}") from error
