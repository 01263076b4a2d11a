"""The real server as a process, and how to ask it. For measurements, and for tests too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from serving.rpc.protocol import Stub, common, messages

START_S = 900.0
STOP_S = 60.0
_SERVE = Path(__file__).parents[1] / "serve.py"


class ServerFailed(Exception):
    """The server did not start, or did not end well; the message is what it said last."""


class Answer(NamedTuple):
    """What a request got. `cached_tokens` of its prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]


@contextlib.contextmanager
def running_server(*options: str, start_s: float = START_S) -> Iterator[Stub]:
    """Run `scripts/serve.py` on a free port and yield a stub of it; stop it in the end.

    Args:
      options: of the server. Its platform is the CPU unless `JAX_PLATFORMS` says otherwise.
      start_s: longest time to wait until it is ready; a first start compiles.

    Raises:
      ServerFailed: it was not ready in time, or its exit code was not 0.
    """
    command = [sys.executable, str(_SERVE), "--port", "0", *options]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            address = _until_ready(process, start_s)
            if address is not None:
                with grpc.insecure_channel(address) as channel:
                    yield Stub(channel)
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()
        if address is None or process.returncode:
            log.seek(0)
            last = [line for line in log.read().splitlines() if line.strip()][-1:]
            raise ServerFailed(
                f"the server ended with exit code {process.returncode}: "
                f"{''.join(last) or 'no message'}"
            )


def ask(stub: Stub, prompt: Sequence[int], max_tokens: int) -> Answer:
    """The likeliest continuation of a prompt, `max_tokens` long."""
    request = messages.GenerateRequest(
        request_id=uuid.uuid4().hex,
        tokenized=messages.TokenizedInput(input_ids=prompt),
        sampling_params=messages.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True
        ),
    )
    *_, reply = stub.Generate(request)
    end = reply.complete
    return Answer(end.prompt_tokens, end.cached_tokens, tuple(end.output_ids))


def flush(stub: Stub) -> None:
    """Make the server forget all prefixes.

    Raises:
      ServerFailed: it did not.
    """
    reply = stub.FlushCache(common.FlushCacheRequest(timeout_s=STOP_S))
    if not reply.success:
        raise ServerFailed(f"the server did not forget its prefixes: {reply.message}")


def _until_ready(process: subprocess.Popen[str], start_s: float) -> str | None:
    """The address of a server, or None if it ended first."""
    assert process.stdout is not None
    timer = threading.Timer(start_s, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith("ready "):
                return line.split()[1]
        return None
    finally:
        timer.cancel()
