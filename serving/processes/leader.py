"""Host 0: gathers the others, leads them through the start, sends them its calls, watches them.

Threads: one receives from each host, one sends signs of life and looks for hosts that are lost. The
first reason to end, wherever it comes from, is *the* reason: it goes to the server, which ends its
streams, and to all hosts, which end with it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Generator

from k3jax.config import ConfigError
from serving.processes.agreement import Hello, find_differences
from serving.processes.channel import Channel, ChannelError, Message, accept, listen
from serving.processes.leaving import Exit
from serving.processes.messages import Kind, pack_json, unpack_beat, unpack_json
from serving.processes.place import Place
from serving.processes.watch import BEAT_S, LAST_PHASE, HostWatch, WatchLimits
from serving.rpc.logs import log_event

_POLL_S = 0.2
# An error of a device call is often only the first sign that another host is gone.
_ERROR_GRACE_S = 0.5
# For the server to tell its clients; it normally exits before.
_EXIT_S = 3.0
_STOP_S = 5.0


class HostLostError(Exception):
    """The group cannot start or go on; the message names the host and says why.

    Attributes:
      code: exit code of all processes.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


class _Host:
    """Another host, as host 0 knows it. Guarded by the leader's condition."""

    def __init__(self, hello: Hello, channel: Channel, limits: WatchLimits):
        self.id, self.hello, self.channel = hello.host_id, hello, channel
        self.watch = HostWatch(limits, time.monotonic())
        self.values: dict[str, int] = {}  # of the phases that it has come through
        self.has_failed = self.is_gone = False


class Leader:
    """The group, as host 0 sees it. With no other host everything here is trivial.

    Args:
      hello: what this process has told of itself if it were another host.
      exit: of this process.
    """

    def __init__(self, place: Place, key: bytes, hello: Hello, limits: WatchLimits, exit: Exit):
        self.place = place
        self._key, self._hello, self._limits, self._exit = key, hello, limits, exit
        self._condition = threading.Condition()
        self._hosts: dict[int, _Host] = {}
        self._on_lost: Callable[[HostLostError], None] = lambda error: None
        self._on_drain: Callable[[], None] = lambda: None
        self._verdict: HostLostError | None = None
        self._is_stopping = False
        self._sequence = 0
        self._step_started_s: float | None = None

    def attach(
        self, *, on_lost: Callable[[HostLostError], None], on_drain: Callable[[], None]
    ) -> None:
        """Name whom to tell, from any thread, that the group ends, or that it was asked to end."""
        self._on_lost, self._on_drain = on_lost, on_drain

    def gather(self, timeout_s: float) -> None:
        """Wait until all hosts have come and agree with this one.

        Raises:
          HostLostError: some did not come in time, or one cannot start.
          ConfigError: some differ from this one.
        """
        if self.place.is_alone:
            return
        with contextlib.closing(open_door(self.place)) as door:
            refusal = self._receive_all(door, time.monotonic() + timeout_s)
        for host in self._hosts.values():
            threading.Thread(
                target=self._listen_to, args=(host,), name=f"host {host.id}", daemon=True
            ).start()
        missing = self._missing()
        if missing:
            names = ", ".join(map(str, missing))
            hint = f"; last connection refused: {refusal}" if refusal else ""
            raise HostLostError(
                f"hosts are missing: got none of host {names} within {timeout_s:g} s; expected "
                f"{self.place.num_hosts - 1} connections to port {self.place.control_port}{hint}"
            )
        problems = find_differences(self._hello, [host.hello for host in self._hosts.values()])
        if problems:
            raise ConfigError(problems)
        for host in self._hosts.values():
            self._send(host, Kind.WELCOME)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def barrier(self, phase: str, value: int = 0) -> int:
        """Wait until all hosts have come through a phase of the start.

        Returns:
          The smallest `value` of any host.

        Raises:
          HostLostError: the group ends.
        """
        with self._condition:
            hosts = self._hosts.values()
            self._condition.wait_for(
                lambda: self._verdict or all(phase in host.values for host in hosts)
            )
            if self._verdict:
                raise self._verdict
            value = min([value, *(host.values[phase] for host in hosts)])
            if phase == LAST_PHASE:
                for host in hosts:
                    host.watch.start_serving()
        for host in self._hosts.values():
            self._send(host, Kind.PROCEED, pack_json({"phase": phase, "value": value}))
        return value

    def send_call(self, kind: Kind, body: bytes) -> None:
        """Send a device call to all hosts. Used by the engine's thread only.

        Raises:
          ChannelError: a host is gone.
        """
        self._sequence += 1
        now_s = time.monotonic()
        with self._condition:
            for host in self._hosts.values():
                host.watch.sent(self._sequence, now_s, is_step=kind is Kind.RUN)
        for host in self._hosts.values():
            host.channel.send(kind, body, sequence=self._sequence)

    @contextlib.contextmanager
    def device_call(self) -> Generator[None]:
        """Around a call that may wait for devices, or fail because another host is lost.

        An error inside is raised only if no host turns out to be lost. Else this never returns:
        the process is about to end.
        """
        self._step_started_s = time.monotonic()
        try:
            yield
        except Exception:
            if not self.place.is_alone and self._await_verdict(self._limits.silence_s + BEAT_S):
                threading.Event().wait()
            raise
        finally:
            self._step_started_s = None

    def fail(self, message: str, code: int = 1) -> None:
        """End the group for a reason; only the first one counts. Returns at once."""
        with self._condition:
            if self._verdict is not None or self._is_stopping:
                return
            self._verdict = HostLostError(message, code)
            self._condition.notify_all()
        log_event("group_failed", message=message)
        self._on_lost(self._verdict)
        self._tell_all(code, message)
        self._exit.after(_EXIT_S, code, f"serve.py: error: {message}")

    def stop(self, code: int = 0, message: str = "") -> None:
        """Let all hosts exit, and wait until they have, for a few seconds.

        Args:
          message: why, if it is not the regular end.
        """
        with self._condition:
            if self._verdict is not None:  # all that can hear it have been told
                return
            self._is_stopping = True
        self._tell_all(code, message)
        with self._condition:
            self._condition.wait_for(
                lambda: all(host.is_gone for host in self._hosts.values()), timeout=_STOP_S
            )

    def _receive_all(self, door: socket.socket, end_s: float) -> str:
        """Take connections until all hosts are there; return why the last bad one was refused."""
        refusal = ""
        while self._missing() and time.monotonic() < end_s:
            waiting = [host.channel for host in self._hosts.values()]
            readable, _, _ = select.select([door, *waiting], (), (), _POLL_S)
            # A host says nothing while it waits, so this is its end; another may take its place.
            for id in [id for id, host in self._hosts.items() if host.channel in readable]:
                self._hosts.pop(id).channel.close()
            if door in readable:
                try:
                    self._receive(accept(door, self._key), end_s)
                except ChannelError as error:
                    refusal = str(error)
                    log_event("connection_refused", message=refusal)
        return refusal

    def _receive(self, channel: Channel, end_s: float) -> None:
        channel.set_timeout(max(1.0, end_s - time.monotonic()))
        message = channel.receive()
        channel.set_timeout(None)
        if message.kind == Kind.FAILED:
            body = unpack_json(message.body)
            raise HostLostError(f"host {body['host']}: {body['message']}", body["code"])
        if message.kind != Kind.HELLO:
            raise ChannelError("it did not introduce itself")
        hello = Hello.unpack(message.body)
        if not 0 < hello.host_id < self.place.num_hosts or hello.host_id in self._hosts:
            text = (
                f"host id is taken or out of range: got {hello.host_id}; expected one of "
                f"{self._missing()}"
            )
            channel.offer(Kind.STOP, pack_json({"code": 2, "message": text}))
            channel.close()
            raise ChannelError(text)
        self._hosts[hello.host_id] = _Host(hello, channel, self._limits)
        log_event("host_connected", host=hello.host_id)

    def _missing(self) -> list[int]:
        return [id for id in range(1, self.place.num_hosts) if id not in self._hosts]

    def _listen_to(self, host: _Host) -> None:
        """Take the messages of one host until its end."""
        try:
            while True:
                message = host.channel.receive()
                with self._condition:
                    host.watch.heard(time.monotonic())
                self._take(host, message)
        except ChannelError as error:
            host.channel.close()
            with self._condition:
                host.is_gone = True
                self._condition.notify_all()
            if not host.has_failed:  # else its own reason counts
                self.fail(f"host {host.id} is lost: {error}")

    def _take(self, host: _Host, message: Message) -> None:
        match message.kind:
            case Kind.BEAT:
                taken, finished = unpack_beat(message.body)
                with self._condition:
                    host.watch.acknowledged(taken, finished, time.monotonic())
            case Kind.ARRIVED:
                body = unpack_json(message.body)
                with self._condition:
                    host.values[body["phase"]] = body["value"]
                    self._condition.notify_all()
            case Kind.DRAIN:
                log_event("drain_asked", host=host.id)
                self._on_drain()
            case Kind.FAILED:
                body = unpack_json(message.body)
                host.has_failed = True
                text = f"host {host.id}: {body['message']}"
                timer = threading.Timer(_ERROR_GRACE_S, self.fail, (text, body["code"]))
                timer.daemon = True
                timer.start()
            case _:
                raise ChannelError(f"it sent a message of kind {message.kind}")

    def _watch(self) -> None:
        """Send signs of life, and look for hosts that give none, or do not get on."""
        while self._verdict is None and not self._is_stopping:
            time.sleep(BEAT_S / 2)
            now_s = time.monotonic()
            for host in self._hosts.values():
                host.channel.offer(Kind.BEAT)
                with self._condition:
                    verdict = host.watch.verdict(now_s)
                if verdict is not None and not host.is_gone:
                    self.fail(f"host {host.id} is lost: it {verdict}")
            started_s = self._step_started_s
            if started_s is not None and now_s - started_s > self._limits.step_s + BEAT_S:
                self.fail(f"host 0 hangs: its step runs for {now_s - started_s:.1f} s")

    def _await_verdict(self, timeout_s: float) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._verdict, timeout=timeout_s))

    def _tell_all(self, code: int, message: str) -> None:
        body = pack_json({"code": code, "message": message})
        for host in list(self._hosts.values()):  # more may come while the group is gathered
            host.channel.offer(Kind.STOP, body, patience_s=BEAT_S)

    def _send(self, host: _Host, kind: Kind, body: bytes = b"") -> None:
        """Send to a host; if it is gone, whoever receives from it says so."""
        with contextlib.suppress(ChannelError):
            host.channel.send(kind, body)


def open_door(place: Place) -> socket.socket:
    """Open host 0's port, on loopback only if the group is on this machine."""
    address = "::" if ":" in place.address else "0.0.0.0"
    if place.address in ("127.0.0.1", "::1", "localhost"):
        address = "127.0.0.1" if place.address == "localhost" else place.address
    return listen(address, place.control_port)
