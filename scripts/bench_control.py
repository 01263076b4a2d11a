"""Compare two ways to keep the processes of a server in step, over loopback and without devices.

* `packed`: host 0 plans and packs, and sends the packed step; the other process unpacks it.
* `events`: host 0 sends what happened (requests with their tokens); the other process has a
  scheduler of its own, and plans and packs the same step again.

Printed per step: bytes on the wire; what sending adds to host 0's turn; the time from the start of
the turn until the other process has the arrays of the step; the other process's CPU time. Medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from host_bench.steps import K3_PAGES, VOCAB_SIZE

from k3jax.config import EngineConfig
from serving import scheduler
from serving.packing import pack_plan
from serving.page_table import empty_table
from serving.plan import StepPlan, StepResult
from serving.processes import channel as channels
from serving.processes.channel import Channel
from serving.processes.messages import Kind, pack_json, pack_run, unpack_json, unpack_run
from serving.request import Request, SamplingParams

FORMS = ("packed", "events")
WARM_UP = 20
_KEY = b"bench"
_PREFILL_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Case:
    """Decoding steps of some rows, or steps of one new prompt each (`rows` is 0)."""

    rows: int

    def __str__(self) -> str:
        return f"{self.rows} rows" if self.rows else f"prefill of {_PREFILL_TOKENS}"


class Host:
    """A scheduler in the state of a case; two of them that get the same events plan alike."""

    def __init__(self, case: Case):
        self._max_rows = max(1, case.rows)
        engine = EngineConfig(
            max_rows=self._max_rows,
            max_context_tokens=16384,
            max_prefill_tokens=8192,
            max_prefill_rows=min(self._max_rows, 16),
        )
        num_pages = 1 + (self._max_rows + 2) * (
            K3_PAGES.request_pages(8192) + 2 * K3_PAGES.num_state_pages
        )
        self._limits = scheduler.make_limits(
            engine, K3_PAGES, num_pages=num_pages, vocab_size=VOCAB_SIZE
        )
        self._state = scheduler.initial_state(empty_table(K3_PAGES, num_pages), self._limits)
        self._before: StepPlan | None = None
        for number in range(case.rows):
            self.submit(number, np.full(700, 1 + number, np.int32))
            self.plan()

    def submit(self, number: int, tokens: np.ndarray) -> None:
        """The event of a new request."""
        request = Request(
            request_id=f"r{number}",
            prompt=tuple(tokens.tolist()),
            sampling=SamplingParams(seed=number, max_tokens=4096),
            eos_token_ids=(),
        )
        self._state = scheduler.submit(self._state, self._limits, request)

    def plan(self) -> np.ndarray:
        """Plan and pack the next step, and commit the one before."""
        self._state, step = scheduler.plan(self._state, self._limits)
        assert step is not None
        packed = pack_plan(step, K3_PAGES.num_state_pages, self._max_rows)
        if self._before is not None:
            self._commit(self._before)
        self._before = step
        return packed

    def end(self, number: int) -> None:
        """Commit what is in flight, and end the request."""
        assert self._before is not None
        self._commit(self._before)
        self._before = None
        self._state, _ = scheduler.abort(self._state, f"r{number}")

    def _commit(self, step: StepPlan) -> None:
        count = len(step.rows)
        result = StepResult(
            step_id=step.step_id, tokens=np.full(count, 7, np.int32), finite=np.ones(count, bool)
        )
        self._state, _ = scheduler.commit(self._state, result)


def main() -> int:
    """Measure all cases in both forms, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", metavar="FILE", help="write one line a measurement")
    parser.add_argument("--worker", nargs=3, metavar=("PORT", "FORM", "ROWS"), help="internal")
    args = parser.parse_args()
    if args.worker:
        port, form, rows = args.worker
        work(channels.connect("127.0.0.1", int(port), _KEY, timeout_s=30.0), form, Case(int(rows)))
        return 0
    results = [measure(form, Case(rows), args.steps) for rows in (1, 64, 256, 0) for form in FORMS]
    print(
        "| step | form | bytes | added to host 0, us | until the other has it, us | its CPU, us |"
    )
    print("|---|---|---|---|---|---|")
    for result in results:
        medians = [f"{statistics.median(result[name]):.0f}" for name in ("added", "until", "cpu")]
        cells = [result["case"], result["form"], f"{result['bytes']:,}", *medians]
        print(f"| {' | '.join(cells)} |")
    if args.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        with open(args.json, "w") as file:
            file.writelines(json.dumps(result | versions) + "\n" for result in results)
    return 0


def measure(form: str, case: Case, num_steps: int) -> dict[str, Any]:
    """One case in one form; times in microseconds, one a step."""
    with channels.listen("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(port), form, str(case.rows)]
        )
        channel = channels.accept(door, _KEY)
    host = Host(case)
    channel.receive()  # it is ready
    samples: dict[str, list[float]] = {"added": [], "until": [], "cpu": []}
    num_bytes = 0
    for number in range(num_steps + WARM_UP):
        tokens = np.arange(number, number + _PREFILL_TOKENS, dtype=np.int32)
        begin = time.perf_counter_ns()
        event = b"" if case.rows else tokens.tobytes()
        if form == "events":
            added, num_bytes = _send(channel, number, lambda event=event: event)
        if not case.rows:
            host.submit(number, tokens)
        packed = host.plan()
        if form == "packed":
            added, num_bytes = _send(
                channel, number, lambda packed=packed: pack_run(3, packed[None])
            )
        cpu_ns = unpack_json(channel.receive().body)
        until = time.perf_counter_ns() - begin
        if not case.rows:
            host.end(number)
        if number >= WARM_UP:
            for name, value in (("added", added), ("until", until), ("cpu", cpu_ns)):
                samples[name].append(value / 1e3)
    channel.close()
    worker.wait(30)
    return {"case": str(case), "form": form, "bytes": num_bytes, **samples}


def work(channel: Channel, form: str, case: Case) -> None:
    """The other process: get the arrays of each step, and answer with the CPU time that it took."""
    host = Host(case) if form == "events" else None
    channel.send(Kind.HELLO)
    while True:
        try:
            message = channel.receive()
        except channels.ChannelError:
            return
        begin = time.process_time_ns()
        if host is None:
            unpack_run(message.body)
        else:
            if not case.rows:
                host.submit(message.sequence, np.frombuffer(message.body, np.int32))
            host.plan()
        taken = time.process_time_ns() - begin
        channel.send(Kind.BEAT, pack_json(taken))
        if host is not None and not case.rows:
            host.end(message.sequence)


def _send(channel: Channel, number: int, make: Callable[[], bytes]) -> tuple[int, int]:
    """Send a step; nanoseconds that it took, and bytes with the header."""
    begin = time.perf_counter_ns()
    body = make()
    channel.send(Kind.RUN, body, sequence=number)
    return time.perf_counter_ns() - begin, len(body) + channels.HEADER_BYTES


if __name__ == "__main__":
    sys.exit(main())
