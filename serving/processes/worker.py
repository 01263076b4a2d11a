"""A process other than host 0: connects to it, comes through the start with it, repeats its calls.

Threads: one receives, one sends signs of life and acknowledgements, one waits for the devices, and
the caller of `repeat` makes the device calls. The process ends when host 0 says so or is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from k3jax.buckets import Bucket
from serving.processes.agreement import Hello
from serving.processes.channel import Channel, ChannelError, Message, connect
from serving.processes.leaving import Exit
from serving.processes.messages import CALLS, Kind, pack_beat, pack_json, unpack_json
from serving.processes.place import Place, join_address
from serving.processes.repeat import Model, Pending, make_call
from serving.processes.watch import BEAT_S, LAST_PHASE, SILENCE_S, START_SILENCE_S

# Host 0 has to gather all hosts before it can answer; it ends earlier if it cannot.
_WELCOME_MARGIN_S = 15.0
# How long this process waits for its end after it told host 0 why it fails.
_VERDICT_S = SILENCE_S + 2.0


class Worker:
    """This process's side of the group. `join_leader` makes one."""

    def __init__(self, place: Place, channel: Channel, exit: Exit):
        self._name = f"host {place.host_id}"
        self._channel, self._exit = channel, exit
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Pending]] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._silence_s = START_SILENCE_S
        self._taken = self._finished = 0
        for work in (self._listen, self._beat, self._wait_for_devices):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def barrier(self, phase: str, value: int = 0) -> int:
        """Tell that a phase of the start is over, and wait until it is everywhere.

        Returns:
          The smallest `value` of any host.
        """
        self._send(Kind.ARRIVED, pack_json({"phase": phase, "value": value}))
        message = self._inbox.get()
        body: dict[str, Any] = {}
        if message.kind == Kind.PROCEED:
            body = unpack_json(message.body)
        if body.get("phase") != phase:
            self.fail(f"out of step: got {body or message.kind} at the end of phase {phase}")
        if phase == LAST_PHASE:
            self._silence_s = SILENCE_S
        return body["value"]

    def repeat(self, model: Model, buckets: Sequence[Bucket]) -> NoReturn:
        """Make the calls of host 0 until the process ends."""
        while True:
            message = self._inbox.get()
            if message.sequence != self._taken + 1 or message.kind not in CALLS:
                self.fail(
                    f"out of step: got call {message.sequence} of kind {message.kind}; expected "
                    f"call {self._taken + 1}"
                )
            self._taken += 1
            try:
                pending = make_call(model, buckets, message)
            except Exception as error:
                self.fail(describe(error))
            if pending is not None:
                self._results.put((message.sequence, pending))

    def drain(self) -> None:
        """Ask host 0 to drain the server; it will end this process too."""
        self._channel.offer(Kind.DRAIN, patience_s=BEAT_S)

    def fail(self, message: str, code: int = 1) -> NoReturn:
        """Tell host 0 why this process ends, and wait for its word: another host may be the cause.

        The process ends in any case.
        """
        self._channel.offer(
            Kind.FAILED, pack_json({"message": message, "code": code}), patience_s=BEAT_S
        )
        time.sleep(_VERDICT_S)
        self._leave(code, message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                self._heard_s = time.monotonic()
                match message.kind:
                    case Kind.BEAT:
                        pass
                    case Kind.STOP:
                        body = unpack_json(message.body)
                        self._leave(body["code"], body["message"])
                    case _:
                        self._inbox.put(message)
        except ChannelError as error:
            self._leave(1, f"host 0 is lost: {error}")

    def _beat(self) -> None:
        while True:
            self._channel.offer(Kind.BEAT, pack_beat(self._taken, self._finished))
            silence_s = time.monotonic() - self._heard_s
            if silence_s > self._silence_s:
                self._leave(1, f"host 0 is lost: it is silent for {silence_s:.1f} s")
            time.sleep(BEAT_S)

    def _wait_for_devices(self) -> None:
        while True:
            sequence, pending = self._results.get()
            try:
                pending.block_until_ready()
            except Exception as error:
                self.fail(describe(error))
            self._finished = sequence

    def _send(self, kind: Kind, body: bytes) -> None:
        try:
            self._channel.send(kind, body)
        except ChannelError as error:
            self._leave(1, f"host 0 is lost: {error}")

    def _leave(self, code: int, message: str) -> NoReturn:
        self._exit.now(code, last_line(self._name, message))


def join_leader(place: Place, key: bytes, hello: Hello, exit: Exit, *, timeout_s: float) -> Worker:
    """Connect to host 0, and wait until it has found that all hosts agree.

    Raises:
      ChannelError: host 0 does not answer, or ended.
    """
    address = join_address(place.address, place.control_port)
    end_s = time.monotonic() + timeout_s
    try:
        channel = connect(place.address, place.control_port, key, timeout_s=timeout_s)
        channel.set_timeout(max(0.0, end_s - time.monotonic()) + _WELCOME_MARGIN_S)
        channel.send(Kind.HELLO, hello.pack())
        message = channel.receive()
    except ChannelError as error:
        raise ChannelError(f"host 0 at {address} is lost: {error}") from error
    if message.kind == Kind.STOP:
        channel.close()
        body = unpack_json(message.body)
        exit.now(body["code"], last_line(f"host {place.host_id}", body["message"]))
    channel.set_timeout(None)
    return Worker(place, channel, exit)


def last_line(name: str, message: str) -> str:
    """What a worker prints at its end: the reason; without one it is the regular end."""
    if not message:
        return f"serve.py: {name} stops"
    return f"serve.py: {name}: {message.removeprefix(f'{name}: ')}"


def describe(error: Exception) -> str:
    """An error of any library as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"
