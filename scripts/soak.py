"""Load a server of its own for long, kill it in the middle, and look for anything that stays.

    JAX_PLATFORMS=cpu python scripts/soak.py --minutes 20 --json soak.jsonl

Clients ask a set of questions over and over: mixed lengths, shared prefixes, greedy and seeded,
with speculation. Some leave at any moment, some send bad requests. At half time the server gets
SIGKILL and is started again. Checked:

* every finished answer is the one that the question had alone, before the load and without a prefix
  to reuse;
* a bad request ends with INVALID_ARGUMENT, a stream that the kill cuts off with UNAVAILABLE, and
  nothing else fails;
* after the load nothing runs, waits or holds a page, and FlushCache empties the pool;
* in each life of the server requests were preempted, or the pool is too large to show anything of
  that;
* nothing was compiled while serving;
* memory does not grow: its median in the last quarter of a server's life is at most `--growth`
  above that in the second quarter.

The answers of a batch are those of one request only without rounding differences, so the server
runs in float32. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

from soak_test.questions import Question, bad_request, questions  # noqa: E402
from soak_test.watch import growth, resident_bytes, scrape, total  # noqa: E402

from serving.option_types import number  # noqa: E402
from serving.rpc.protocol import Stub, common  # noqa: E402

_START_S = 600.0
_REQUEST_S = 300.0
_SAMPLE_S = 5.0
_SHOWN = ("evictions", "reused_tokens", "tried_drafts", "taken_drafts", "steps")


def main() -> int:
    args = _parse_args()
    soak = Soak(args)
    asyncio.run(soak.run())
    report = soak.report()
    print(json.dumps(report, indent=1))
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(json.dumps(report) + "\n")
    return int(bool(report["problems"]))


class Process:
    """A server process.

    Attributes:
      address: of its gRPC port. metrics_port: of its metrics.
    """

    def __init__(self, args: argparse.Namespace, log: Path):
        self._log = log.open("a")
        self.metrics_port = args.metrics_port
        command = [
            *(sys.executable, "scripts/serve.py", "--port", "0", "--dtype", "float32"),
            *("--metrics-port", str(args.metrics_port), "--max-rows", str(args.max_rows)),
            *("--max-context", "2048", "--max-waiting-tokens", str(2048 * args.clients)),
            *("--speculate", args.speculate),
            *("--num-pages", str(args.num_pages)),
            *([] if args.cache_dir is None else ["--cache-dir", str(args.cache_dir)]),
        ]
        self._child = subprocess.Popen(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.pid = self._child.pid
        self.address = self._wait()

    def _wait(self) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._log.write(line)
            if line.startswith("ready "):
                return line.split()[1]
        raise RuntimeError(f"the server ended with {self._child.wait()}; see {self._log.name}")

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()
        self._child.wait()

    def stop(self) -> int:
        """Let it drain; its exit code."""
        self._child.send_signal(signal.SIGTERM)
        return self._child.wait(timeout=120)


@dataclasses.dataclass
class Life:
    """What was seen of one server process."""

    resident: list[float] = dataclasses.field(default_factory=list)
    compilations: float = 0.0
    preemptions: float = 0.0


class Soak:
    """One run."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._rng = random.Random(args.seed)
        text = (CHECKOUT / "serving" / "server.py").read_bytes()
        self._questions = questions(self._rng, list(text), args.questions)
        self._solo: dict[Question, list[int]] = {}
        self._problems: list[str] = []
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._lives: list[Life] = []
        self._asked = 0
        self._final: dict[str, float] = {}

    async def run(self) -> None:
        """The whole run; problems are noted, not raised."""
        half_s = self._args.minutes * 30
        process = await asyncio.to_thread(Process, self._args, self._args.log)
        async with self._channel(process) as stub:
            for question in self._questions:
                self._solo[question] = await self._alone(stub, question)
            self._say(f"{len(self._solo)} questions answered alone")
        await self._load(process, half_s, kill=True)
        process = await asyncio.to_thread(Process, self._args, self._args.log)
        self._say("started again")
        await self._load(process, half_s, kill=False)
        async with self._channel(process) as stub:
            await self._check_empty(process, stub)
        code = await asyncio.to_thread(process.stop)
        if code:
            self._problem(f"the server ended with {code} after SIGTERM")

    def report(self) -> dict[str, Any]:
        """What was seen."""
        grown = [growth(life.resident) for life in self._lives]
        for share in grown:
            if share > self._args.growth:
                self._problem(f"memory grew by {share:.1%}")
        for life in self._lives:
            if life.compilations:
                self._problem(f"{life.compilations:.0f} programs were compiled while serving")
            if not life.preemptions:
                self._problem("no request was preempted: choose fewer --num-pages")
        return {
            "minutes": self._args.minutes,
            "clients": self._args.clients,
            "outcomes": dict(self._outcomes),
            "resident_mb": [
                [round(x / 2**20) for x in (life.resident[:1] + life.resident[-1:])]
                for life in self._lives
            ],
            "growth": [round(share, 4) for share in grown],
            "preemptions": [int(life.preemptions) for life in self._lives],
            "metrics": self._final,
            "problems": self._problems,
        }

    @contextlib.asynccontextmanager
    async def _channel(self, process: Process) -> AsyncIterator[Stub]:
        async with grpc.aio.insecure_channel(process.address) as channel:
            yield Stub(channel)

    async def _alone(self, stub: Stub, question: Question) -> list[int]:
        await stub.FlushCache(common.FlushCacheRequest())
        tokens: list[int] = []
        async for reply in stub.Generate(question.message(self._name())):
            tokens += reply.chunk.token_ids
        return tokens

    async def _load(self, process: Process, seconds: float, *, kill: bool) -> None:
        """All clients for so long, or until the server is killed."""
        end_s = time.monotonic() + seconds
        life = Life()
        self._lives.append(life)
        killed = asyncio.Event()
        async with self._channel(process) as stub, asyncio.TaskGroup() as group:
            for _ in range(self._args.clients):
                group.create_task(self._client(stub, end_s, killed, until_killed=kill))
            while time.monotonic() < end_s:
                await asyncio.sleep(min(_SAMPLE_S, max(0.0, end_s - time.monotonic())))
                life.resident.append(resident_bytes(process.pid))
                values = await asyncio.to_thread(scrape, process.metrics_port)
                life.compilations = total(values, "k3jax_compilations_total")
                life.preemptions = total(values, "k3jax_preemptions_total")
            if kill:
                self._say("killed")
                killed.set()
                await asyncio.to_thread(process.kill)

    async def _client(
        self, stub: Stub, end_s: float, killed: asyncio.Event, *, until_killed: bool
    ) -> None:
        """Ask until it is time; with `until_killed`, until the server is gone."""
        while not killed.is_set() if until_killed else time.monotonic() < end_s:
            question = self._rng.choice(self._questions)
            kind = self._rng.random()
            if kind < 0.05:
                outcome = await self._ask_badly(stub, question)
            else:
                leaves = kind < 0.20
                outcome = await self._ask(stub, question, leaves=leaves)
            if killed.is_set() and outcome == "UNAVAILABLE":
                outcome = "cut off"
            elif outcome not in ("answered", "left", "refused"):
                self._problem(f"a request ended with {outcome}")
            self._outcomes[outcome] += 1

    async def _ask(self, stub: Stub, question: Question, *, leaves: bool) -> str:
        """Ask, and perhaps leave at some moment."""
        most = self._rng.randrange(question.max_tokens) if leaves else question.max_tokens
        wait_s = self._rng.random() if leaves and most == 0 else _REQUEST_S
        call = stub.Generate(question.message(self._name()), timeout=_REQUEST_S)
        tokens: list[int] = []
        try:
            async with asyncio.timeout(wait_s):
                async for reply in call:
                    tokens += reply.chunk.token_ids
                    if leaves and len(tokens) >= max(1, most):
                        call.cancel()
                        return "left"
        except TimeoutError:
            call.cancel()
            return "left" if leaves else "a stuck stream"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        if tokens != self._solo[question]:
            self._problem(f"another answer than alone: {question}")
        return "answered"

    async def _ask_badly(self, stub: Stub, question: Question) -> str:
        try:
            async for _ in stub.Generate(bad_request(self._rng, question, self._name())):
                return "an answer to a bad request"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return "refused"
            return error.code().name
        return "no answer to a bad request"

    async def _check_empty(self, process: Process, stub: Stub) -> None:
        """Nothing runs, waits or holds a page."""
        busy, tries = 1.0, 0
        while busy and tries < 100:
            await asyncio.sleep(0.1)
            values, tries = await asyncio.to_thread(scrape, process.metrics_port), tries + 1
            busy = total(values, "k3jax_requests_running") + total(values, "k3jax_requests_waiting")
        values = await asyncio.to_thread(scrape, process.metrics_port)
        held = {name: value for name, value in values.items() if 'state="held"' in name}
        if busy or any(held.values()):
            self._problem(f"after the load: {busy:.0f} requests, pages {held}")
        reply = await stub.FlushCache(common.FlushCacheRequest())
        values = await asyncio.to_thread(scrape, process.metrics_port)
        idle = sum(value for name, value in values.items() if 'state="idle"' in name)
        if not reply.success or idle:
            self._problem(f"FlushCache left {idle:.0f} pages: {reply.message}")
        self._final = {name: total(values, f"k3jax_{name}_total") for name in _SHOWN}

    def _name(self) -> str:
        self._asked += 1
        return f"soak-{self._asked}"

    def _problem(self, text: str) -> None:
        self._say(text)
        if len(self._problems) < 100:
            self._problems.append(text)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind, default, meaning in (
        ("--minutes", float, 20.0, "of load"),
        ("--clients", int, 64, "at once"),
        ("--questions", int, 48, "of which every client asks one after the other"),
        ("--max-rows", int, 16, "of the server"),
        ("--num-pages", int, 44, "of the server's pool; the default is scarce"),
        ("--seed", int, 0, "of the load"),
        ("--metrics-port", int, 9191, "of the server"),
    ):
        parser.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    parser.add_argument(
        "--growth", type=number(float, at_least=0), default=0.03, metavar="SHARE",
        help="of memory that is no problem (default: 0.03)",
    )  # fmt: skip
    parser.add_argument("--speculate", choices=("dspark", "ngram", "off"), default="dspark")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="of the server")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for its output")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the report as a line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
