"""Servers of several processes on loopback, and what becomes of them when a process ends or hangs.

As a program it plays every case several times and prints a table:

    python -m tests.server.groups --rounds 10
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.processes.children import free_ports
from serving.rpc.protocol import Stub
from tests.server.harness import request

ROOT = Path(__file__).parents[2]
START_S = 240.0
END_S = 10.0  # within which everything has to be over

Moment = Literal["prefill", "decode", "idle"]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is done to which host, and when."""

    number: signal.Signals
    host_id: int
    moment: Moment

    def __str__(self) -> str:
        return f"{self.number.name} of host {self.host_id} in {self.moment}"


CASES = (
    *(
        Case(signal.SIGKILL, host_id, moment)
        for host_id in (0, 1)
        for moment in ("prefill", "decode", "idle")
    ),
    Case(signal.SIGSTOP, 1, "decode"),
    Case(signal.SIGSTOP, 1, "idle"),
    Case(signal.SIGTERM, 0, "decode"),
    Case(signal.SIGTERM, 1, "idle"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Seconds from the signal until health said no, the stream ended, and the last process did."""

    health_s: float
    stream_s: float
    exit_s: float


class Group:
    """Processes of one server; each writes to a file of its own.

    Args:
      arguments: of every process; `of_host` has more for some.
    """

    def __init__(
        self,
        folder: Path,
        num_hosts: int,
        *arguments: str,
        of_host: dict[int, tuple[str, ...]] | None = None,
        environment: dict[str, str] | None = None,
    ):
        coordinator, control, port = free_ports(3)
        self.address = f"127.0.0.1:{port}"
        self.mark = f"127.0.0.1:{coordinator}"  # in every command line of this group
        self.files = [folder / f"host-{host_id}.log" for host_id in range(num_hosts)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for host_id, file in enumerate(self.files):
            with file.open("wb") as output:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "scripts/serve.py", "--port", str(port)),
                        *("--coordinator", self.mark, "--control-port", str(control)),
                        *("--num-hosts", str(num_hosts), "--host-id", str(host_id)),
                        *arguments,
                        *(of_host or {}).get(host_id, ()),
                    ],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, host_id: int) -> str:
        return self.files[host_id].read_text(errors="replace")

    def last_line(self, host_id: int) -> str:
        lines = self.text(host_id).splitlines()
        return lines[-1] if lines else ""

    def wait_ready(self) -> None:
        """Wait until every process has said that it is ready."""
        words = [r"^ready ", *(rf"^worker ready host={i}\b" for i in range(1, len(self.files)))]

        def is_ready() -> bool:
            codes = [process.poll() for process in self.processes]
            assert codes == [None] * len(codes), f"a process ended: {codes}\n{self.all_text()}"
            found = [
                re.search(word, self.text(i), re.MULTILINE) is not None
                for i, word in enumerate(words)
            ]
            return all(found)

        until(is_ready, START_S, self.all_text)

    def exit_codes(self, within_s: float = END_S) -> list[int]:
        """Wait for the end of all processes."""
        end_s = time.monotonic() + within_s
        try:
            return [p.wait(max(0.01, end_s - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a process is left\n{self.all_text()}") from None

    def all_text(self) -> str:
        return "".join(f"--- host {i}\n{self.text(i)}" for i in range(len(self.files)))


class Stream:
    """A call of `Generate` that is read in a thread."""

    def __init__(self, stub: Stub, prompt: Iterable[int], max_tokens: int, **sampling: Any):
        self.token_ids: list[int] = []
        self.status = ""
        self.details = ""
        self.end_s = 0.0
        options = {"temperature": 0.0, "ignore_eos": True} | sampling
        self._call = stub.Generate(request("r", tuple(prompt), max_tokens=max_tokens, **options))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        assert self.status, "the stream did not end"

    def _read(self) -> None:
        try:
            for reply in self._call:
                self.token_ids += reply.chunk.token_ids
            self.status = "OK"
        except grpc.RpcError as error:
            self.details = error.details() or ""
            self.status = error.code().name
        self.end_s = time.monotonic()


class HealthWatch:
    """Notes when health stops to say SERVING, be it by a message or by the end of the server."""

    def __init__(self, channel: grpc.Channel):
        stub = health_pb2_grpc.HealthStub(channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(self._call).status == health_pb2.HealthCheckResponse.SERVING
        self.end_s = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        assert self.end_s, "health did not change"

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            next(self._call)
        self.end_s = time.monotonic()


def until(condition: Callable[[], bool], within_s: float, explain: Callable[[], str]) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"the condition did not come true in time\n{explain()}"
        time.sleep(0.05)


def play(group: Group, case: Case) -> Outcome:
    """Play a case on a group that is ready, and check all of its end."""
    with grpc.insecure_channel(group.address) as channel:
        health = HealthWatch(channel)
        stream = _open_stream(Stub(channel), case)
        begin_s = time.monotonic()
        group.processes[case.host_id].send_signal(case.number)
        if case.number is signal.SIGSTOP:
            _check_stopped(group, case)
        codes = group.exit_codes()
        exit_s = time.monotonic() - begin_s
        health.join(1.0)
        if stream is not None:
            stream.join(1.0)
    is_regular = case.number is signal.SIGTERM
    assert stream is None or stream.status == ("OK" if is_regular else "UNAVAILABLE"), (
        stream.details
    )
    if is_regular:
        assert codes == [0] * len(codes), group.all_text()
    else:
        _check_failure(group, case, codes, stream)
    assert not left_behind(group.mark)
    return Outcome(
        health_s=health.end_s - begin_s,
        stream_s=stream.end_s - begin_s if stream else 0.0,
        exit_s=exit_s,
    )


def left_behind(mark: str) -> list[str]:
    """Command lines of living processes that hold a word."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if mark in words and "scripts/serve.py" in words:
            found.append(" ".join(words))
    return found


def _open_stream(stub: Stub, case: Case) -> Stream | None:
    """Bring the server to the moment of the case."""
    if case.moment == "idle":
        return None
    if case.moment == "prefill":
        stream = Stream(stub, (3 + i % 90 for i in range(400)), 50)
        time.sleep(random.uniform(0.1, 0.3))
        assert not stream.token_ids, "the prefill was too fast for this test"
        return stream
    # Long enough to be caught, short enough to end while the server drains.
    stream = Stream(stub, (5, 6, 7), 60 if case.number is signal.SIGTERM else 400)
    until(lambda: len(stream.token_ids) > 3, 60.0, lambda: stream.details)
    return stream


def _check_stopped(group: Group, case: Case) -> None:
    """All others end; the frozen process ends as soon as it can."""
    frozen = group.processes[case.host_id]
    for host_id, process in enumerate(group.processes):
        if host_id != case.host_id:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"host {host_id} is left\n{group.all_text()}") from None
    frozen.send_signal(signal.SIGCONT)


def _check_failure(group: Group, case: Case, codes: list[int], stream: Stream | None) -> None:
    lost = f"host {case.host_id} is lost: "
    for host_id, code in enumerate(codes):
        if case.number is signal.SIGKILL and host_id == case.host_id:
            assert code == -signal.SIGKILL
        elif host_id == case.host_id:  # it was frozen, so to it host 0 is lost
            assert code == 1, group.all_text()
        else:
            start = "serve.py: error: " if host_id == 0 else f"serve.py: host {host_id}: "
            assert group.last_line(host_id).startswith(start + lost), group.all_text()
            assert code == 1, group.all_text()
    if stream is not None and case.host_id != 0:
        assert lost in stream.details, stream.details


def write_model(folder: Path) -> None:
    """Write a model whose steps compile fast, and whose experts divide by two and by three."""
    from tests.tiny import write_tiny_checkpoint

    layers = {"kda_layers": [1, 2], "full_attn_layers": [3]}
    write_tiny_checkpoint(folder, num_hidden_layers=3, linear_attn_config=layers)


def model_arguments(model: Path, cache: Path, mesh: str) -> tuple[str, ...]:
    """Options of a small server whose steps compile fast."""
    return (
        *("--model", str(model), "--cache-dir", str(cache), "--mesh", mesh),
        *("--dtype", "float32", "--max-rows", "1", "--max-context", "512"),
        *("--max-prefill-tokens", "16", "--num-pages", "40"),
    )


def main() -> int:
    """Play all cases and print how long each took."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    num_failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        print("| hosts | case | rounds | health no, s | stream ended, s | all gone, s |")
        print("|---|---|---|---|---|---|", flush=True)
        for num_hosts in args.hosts:
            mesh = "tp2" if num_hosts == 2 else f"dp{num_hosts}"
            arguments = model_arguments(folder / "model", folder / "cache", mesh)
            for case in CASES:
                if args.only in str(case):
                    num_failed += _print_rounds(folder, num_hosts, arguments, case, args.rounds)
    return 1 if num_failed else 0


def _print_rounds(
    folder: Path, num_hosts: int, arguments: tuple[str, ...], case: Case, rounds: int
) -> int:
    """Play one case and print its row; return how many rounds failed."""
    outcomes: list[Outcome] = []
    for index in range(rounds):
        with Group(folder, num_hosts, *arguments) as group:
            try:
                group.wait_ready()
                outcomes.append(play(group, case))
            except AssertionError as error:
                print(f"{case}, {num_hosts} hosts, round {index}: {error}", file=sys.stderr)
    columns = [
        f"{statistics.median(values):.2f} / {max(values):.2f}"
        for field in dataclasses.fields(Outcome)
        if (values := [getattr(outcome, field.name) for outcome in outcomes])
    ]
    print(
        f"| {num_hosts} | {case} | {len(outcomes)}/{rounds} | {' | '.join(columns)} |", flush=True
    )
    return rounds - len(outcomes)


if __name__ == "__main__":
    sys.exit(main())
