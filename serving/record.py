"""A record of all that the schedulers were told, from which their state at any step can be made
again.

Schedulers are pure, and so is the choice between replicas: their configuration and the calls made
to them all together are enough. A file has one JSON object a line: the configuration, then the
events in order. Each is written before the schedulers see it, so the last line is what a scheduler
that failed was doing. Files hold prompts and answers as token ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from k3jax.buckets import Bucket
from serving import replicas
from serving.page_table import CachePolicy, InUse, PageGeometry, PageTable, empty_table
from serving.plan import GroupPlan, GroupResult, Output, StepResult
from serving.replicas import Replicas
from serving.request import Grammar, Request, RequestError, SamplingParams
from serving.scheduler import Limits

logger = logging.getLogger(__name__)

FORMAT = 1


class RecordError(Exception):
    """A file is no record that can be read; the message says why."""


class Setup(NamedTuple):
    """Of the schedulers. `num_pages` of each replica counts the null page."""

    geometry: PageGeometry
    num_pages: int
    policy: CachePolicy
    limits: Limits
    num_replicas: int = 1


class Submitted(NamedTuple):
    """`replicas.submit`, which may refuse."""

    request: Request


class Ended(NamedTuple):
    """`replicas.abort`."""

    request_id: str
    error: RequestError | None = None


class Planned(NamedTuple):
    """`replicas.plan`, which may find nothing to do."""

    paused: Set[str]


class Committed(NamedTuple):
    """`replicas.commit`. The load of the experts and log probabilities are not recorded."""

    result: GroupResult


class Flushed(NamedTuple):
    """`replicas.reset`, which may refuse."""


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


def open_recorder(
    path: Path, table: PageTable, limits: Limits, *, num_replicas: int = 1
) -> Recorder:
    """Begin a record of the schedulers in a new file.

    Args:
      table: of each replica at the beginning.

    Raises:
      OSError: the file exists, or cannot be made.
    """
    file = path.open("x", encoding="utf-8", buffering=1)  # a killed process has written its lines
    recorder = Recorder(file)
    recorder.write(Setup(table.geometry, table.num_pages, table.policy, limits, num_replicas))
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
    """The schedulers after an event.

    Attributes:
      plan: the step that the event planned.
      outputs: of the event.
      refusal: why nothing was done.
    """

    event: Event
    replicas: Replicas
    plan: GroupPlan | None = None
    outputs: tuple[Output, ...] = ()
    refusal: RequestError | InUse | None = None


def replay(setup: Setup, events: Iterator[Event]) -> Iterator[Moment]:
    """Do again what a record says. Raises what a scheduler raised, if it failed."""
    limits = setup.limits
    table = empty_table(setup.geometry, setup.num_pages, setup.policy)
    now = replicas.initial_replicas([table] * setup.num_replicas, limits)
    for event in events:
        match event:
            case Submitted(request):
                try:
                    now = replicas.submit(now, limits, request)
                    yield Moment(event, now)
                except RequestError as error:
                    yield Moment(event, now, refusal=error)
            case Ended(request_id, error):
                now, output = replicas.abort(now, request_id, error=error)
                yield Moment(event, now, outputs=() if output is None else (output,))
            case Planned(paused):
                now, plan = replicas.plan(now, limits, paused=paused)
                yield Moment(event, now, plan=plan)
            case Committed(result):
                now, outputs = replicas.commit(now, result)
                yield Moment(event, now, outputs=tuple(itertools.chain.from_iterable(outputs)))
            case Flushed():
                try:
                    now = replicas.reset(now)
                    yield Moment(event, now)
                except InUse as error:
                    yield Moment(event, now, refusal=error)


def _encode(event: Event | Setup) -> dict[str, Any]:
    match event:
        case Planned(paused):
            return {"op": "plan", "paused": sorted(paused)} if paused else {"op": "plan"}
        case Committed(GroupResult(step_id=step_id, results=(StepResult() as only,))):
            return {"op": "commit", "step": step_id, **_encode_result(only)}
        case Committed(result):
            parts = [one and _encode_result(one) for one in result.results]
            return {"op": "commit", "step": result.step_id, "replicas": parts}
        case Submitted(request):
            return {"op": "submit", "request": dataclasses.asdict(request)}
        case Ended(request_id, error):
            why = None if error is None else [error.status, error.message]
            return {"op": "abort", "id": request_id, "error": why}
        case Flushed():
            return {"op": "flush"}
        case Setup(geometry, num_pages, policy, limits, num_replicas):
            line: dict[str, Any] = {
                "op": "setup",
                "format": FORMAT,
                "geometry": dataclasses.asdict(geometry),
                "num_pages": num_pages,
                "policy": dataclasses.asdict(policy),
                "limits": dataclasses.asdict(limits),
            }
            return line if num_replicas == 1 else line | {"num_replicas": num_replicas}


def _encode_result(result: StepResult) -> dict[str, Any]:
    line: dict[str, Any] = {"tokens": result.tokens.tolist()}
    if not result.finite.all():
        line["not_finite"] = np.flatnonzero(~result.finite).tolist()
    if result.accepted:
        line["accepted"] = result.accepted
    return line


def _decode(line: dict[str, Any]) -> Event | Setup:
    """Raises KeyError, TypeError or ValueError for what `_encode` did not write."""
    match line["op"]:
        case "plan":
            return Planned(frozenset(line.get("paused", ())))
        case "commit":
            step_id = line["step"]
            parts = line.get("replicas", [line])
            results = tuple(one and _decode_result(step_id, one) for one in parts)
            return Committed(GroupResult(step_id=step_id, results=results))
        case "submit":
            values = line["request"]
            sampling = _decode_sampling(values["sampling"])
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
                num_replicas=line.get("num_replicas", 1),
            )
        case _:
            raise ValueError(f"unknown op or format: {line['op']!r}")


def _decode_sampling(values: dict[str, Any]) -> SamplingParams:
    """Lines of older records lack what was added since, and its defaults are right for them."""
    known = {name: value for name, value in values.items() if name != "is_plain"}
    if known.get("grammar") is not None:
        known["grammar"] = Grammar(*known["grammar"])
    pairs = tuple((int(token), float(value)) for token, value in known.get("logit_bias", ()))
    return _make(
        SamplingParams, {"stop": ()} | known | {"logit_bias": pairs}, "stop_token_ids", "stop"
    )


def _decode_result(step_id: int, line: dict[str, Any]) -> StepResult:
    finite = np.ones(len(line["tokens"]), np.bool_)
    finite[line.get("not_finite", [])] = False
    return StepResult(
        step_id=step_id,
        tokens=np.array(line["tokens"], np.int32),
        finite=finite,
        accepted=tuple(tuple(drafts) for drafts in line.get("accepted", ())),
    )


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
