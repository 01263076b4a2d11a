"""The server as a process: signals, exit codes, what it prints. Its device is a fake one."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from serving.rpc.protocol import Stub, messages
from tests.server.harness import PROMPT, request

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "k3-tiny"
DEADLINE_S = 60.0

# serving.cli with a model that takes no time; `FAIL_AT` makes its device fail.
PROGRAM = """
import os, sys
from serving import cli
from tests.fakes import fake_geometry
from tests.server.harness import SlowExecutor, fake_load
executor = SlowExecutor(fake_geometry(page_tokens=64))
executor.fail_at_step = int(os.environ.get("FAIL_AT", -1))
load = fake_load(executor, page_tokens=64, max_context_tokens=3000)
cli.start_model = lambda setup, on_failure: load(on_failure)
sys.exit(cli.main(sys.argv[1:]))
"""


class Process:
    """A server process; its output is read as it comes."""

    def __init__(self, *arguments: str, cache: Path, **environment: str):
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--model", str(MODEL), *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.stderr = ""
        self._readers = [
            threading.Thread(target=self._read_stdout, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def until_line(self, start: str) -> str:
        """The first line of stdout that starts so."""
        while not (line := self._lines.get(timeout=DEADLINE_S)).startswith(start):
            assert line, f"the process ended: {self.stderr}"
        return line

    def exit_code(self) -> int:
        code = self.child.wait(timeout=DEADLINE_S)
        for reader in self._readers:
            reader.join(timeout=DEADLINE_S)
        return code

    def close(self) -> None:
        self.child.kill()
        self.exit_code()
        for pipe in (self.child.stdout, self.child.stderr):
            assert pipe is not None
            pipe.close()

    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("serve.py: error: ")]

    def _read_stdout(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _read_stderr(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.stderr += line


@contextlib.contextmanager
def process(*arguments: str, cache: Path, **environment: str) -> Iterator[Process]:
    server = Process(*arguments, cache=cache, **environment)
    try:
        yield server
    finally:
        server.close()


def test_sigterm_drains_and_exits_with_0_and_a_second_server_on_the_port_with_1(tmp_path: Path):
    with process("--port", "0", cache=tmp_path) as server:
        ready = server.until_line("ready ").split()
        address = ready[1]
        assert "model=k3-tiny" in ready
        port = address.rpartition(":")[2]
        with process("--port", port, cache=tmp_path) as second:
            assert second.exit_code() == 1
            assert second.error_lines() == [
                f"serve.py: error: port is in use: got {address}; expected a free port; "
                "stop the other server or choose another port with --port"
            ]
        with grpc.insecure_channel(address) as channel:
            replies = iter(Stub(channel).Generate(request(max_tokens=100)))
            next(replies)
            server.child.send_signal(signal.SIGTERM)
            rest = list(replies)
        num_tokens = 1 + sum(len(reply.chunk.token_ids) for reply in rest)
        assert num_tokens == 100
        assert rest[-1].complete.finish_reason == "length"
        assert server.exit_code() == 0
        assert server.error_lines() == []


def test_kf_v08_engine_failure_exits_with_1_and_one_line(tmp_path: Path):
    with process("--port", "0", cache=tmp_path, FAIL_AT="3") as server:
        address = server.until_line("ready ").split()[1]
        with grpc.insecure_channel(address) as channel:
            call = Stub(channel).Generate(request(prompt=PROMPT, max_tokens=50))
            with pytest.raises(grpc.RpcError) as error:
                list(call)
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert server.exit_code() == 1
        (line,) = server.error_lines()
        assert "the engine failed: RuntimeError: the fake device failed" in line


def test_log_has_a_line_an_event_and_sigint_ends_the_server_too(tmp_path: Path):
    with process("--port", "0", "--log-level", "debug", cache=tmp_path) as server:
        address = server.until_line("ready ").split()[1]
        with grpc.insecure_channel(address) as channel:
            list(Stub(channel).Generate(request("my-request")))
            Stub(channel).HealthCheck(messages.HealthCheckRequest())
        server.child.send_signal(signal.SIGINT)
        assert server.exit_code() == 0
    assert " info request request_id=my-request finish_reason=length" in server.stderr
    assert "method=HealthCheck status=OK" in server.stderr
