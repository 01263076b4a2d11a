"""The gRPC server around one engine: its port, its phases, its end.

The port opens before the model is loaded, so that gateways can register early and a port that is
taken is noticed at once. `Server.run` then goes through the phases of `Lifecycle`: it loads the
model in a thread, serves until it is stopped or the engine fails, drains, and closes everything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.processes.leader import HostLostError
from serving.request import RequestError
from serving.rpc import protocol
from serving.rpc.lifecycle import Lifecycle, Served
from serving.rpc.loads import totals
from serving.rpc.logs import log_event
from serving.rpc.malformed import RefuseMalformed
from serving.rpc.service import EngineService
from serving.tls import TlsFiles, server_credentials

OnFailure = Callable[[BaseException], None]
# Given what to call when the engine fails, loads the model and returns it with its engine.
Load = Callable[[OnFailure], Served]

# The ping options keep peers that probe a silent stream
# from being sent away. Without the last, a second server would share the port (serving-api.md
# section 11).
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)
# For the last messages of calls that have ended, and for peers that hold a health watch open.
_CLOSE_GRACE_S = 1.0
_ENGINE_STOP_S = 10.0


class ServerError(Exception):
    """The server cannot start, or had to end; the message says why."""


class StoppedWhileLoadingError(Exception):
    """The server was stopped before the model was loaded; its loading thread is still busy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and how it ends.

    Attributes:
      port: 0 takes a free one.
      tls: None serves in the clear.
      max_message_bytes: of a request. A prompt of two million token ids is 6 MB.
      drain_s: time that running requests have to finish after the server was told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tls: TlsFiles | None = None
    max_message_bytes: int = 64 * 2**20
    drain_s: float = 30.0


class Server:
    """A server on one port. Lives on the event loop.

    Args:
      service, lifecycle: the engine service, and the phase that it shares with the health service.
    """

    def __init__(self, config: ServerConfig, service: EngineService, lifecycle: Lifecycle):
        self._config, self._service, self._lifecycle = config, service, lifecycle
        self._loop = asyncio.get_running_loop()
        limit = ("grpc.max_receive_message_length", config.max_message_bytes)
        self._server = grpc.aio.server(interceptors=[RefuseMalformed()], options=(*_OPTIONS, limit))
        self._stop_asked = asyncio.Event()
        self._stop_hurried = asyncio.Event()
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()

    async def open(self) -> str:
        """Open the port, in phase `starting`, and return its address.

        Raises:
          ServerError: the address cannot be used, for instance because another server has it.
        """
        host, port = self._config.host, self._config.port
        check_address(host, port)
        protocol.add_servicer(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._lifecycle.health, self._server)  # pyright: ignore
        names = (protocol.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)  # pyright: ignore
        await self._lifecycle.publish()
        try:
            if self._config.tls is None:
                port = self._server.add_insecure_port(_address(host, port))
            else:
                credentials = server_credentials(self._config.tls)
                port = self._server.add_secure_port(_address(host, port), credentials)
        except RuntimeError as error:
            raise ServerError(f"cannot listen on {_address(host, port)}: {error}") from error
        await self._server.start()
        log_event("listening", address=_address(host, port))
        return _address(host, port)

    def stop(self) -> None:
        """Begin to drain; called again, end at once. Returns immediately."""
        if self._stop_asked.is_set():
            self._stop_hurried.set()
        self._stop_asked.set()

    def drain(self) -> None:
        """Begin to drain, unless that has begun. Called in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_asked.set)

    async def run(self, load: Load, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """Load the model, serve until `stop`, drain, close.

        Args:
          on_ready: called when requests are taken.

        Raises:
          ServerError: the engine failed, or does not stop.
          HostLostError: another process of the server was lost.
          StoppedWhileLoadingError: see there.
          Exception: whatever `load` raised.
        """
        try:
            served = await self._load(load)
            self._lifecycle.served = served
            await self._lifecycle.move("serving", "ready")
            on_ready()
            await self._first_of(self._stop_asked.wait())
            if not self._failure.done():
                await self._drain(served)
            self._raise_failure()
        except StoppedWhileLoadingError:
            await self._lifecycle.move("draining", "stopped before the model was loaded")
            raise
        except Exception as error:
            await self._lifecycle.move("failed", str(error))
            raise
        finally:
            self._service.end_subscriptions()
            await self._server.stop(_CLOSE_GRACE_S)
            served = self._lifecycle.served
            log_event("closed", **totals(served.engine.counts()) if served is not None else {})

    async def _load(self, load: Load) -> Served:
        loading = in_daemon_thread(lambda: load(self.fail))
        await self._first_of(self._stop_asked.wait(), loading)
        self._raise_failure()
        if not loading.done():
            raise StoppedWhileLoadingError("the server was stopped while the model was loaded")
        served = loading.result()
        self._service.attach(served)
        served.engine.start()
        return served

    def fail(self, error: BaseException) -> None:
        """End the server: its engine failed, or a host was lost. Called in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if self._failure.done():
            return
        self._failure.set_result(error)
        if isinstance(error, HostLostError):  # the engine may hang: it ends no stream
            self._service.end_all(RequestError("UNAVAILABLE", str(error)))

    def _raise_failure(self) -> None:
        if self._failure.done():
            error = self._failure.result()
            if isinstance(error, HostLostError):
                raise error
            raise ServerError(f"the engine failed: {type(error).__name__}: {error}")

    async def _drain(self, served: Served) -> None:
        """Let open calls end, but not for longer than the limit; end the rest with UNAVAILABLE."""
        limit_s = self._config.drain_s
        await self._lifecycle.move("draining", f"running requests have {limit_s:g} s to finish")
        self._service.end_subscriptions()
        await self._first_of(
            self._service.wait_idle(), self._stop_hurried.wait(), timeout_s=limit_s
        )
        log_event("drained", num_left=self._service.num_open)
        served.engine.stop()
        if not await asyncio.to_thread(served.engine.join, _ENGINE_STOP_S):
            age_s = served.engine.step_age_s()
            raise ServerError(f"the engine does not stop: its step has run for {age_s:.0f} s")

    async def _first_of(
        self,
        *events: Coroutine[Any, Any, Any] | asyncio.Future[Any],
        timeout_s: float | None = None,
    ) -> None:
        """Wait for the first of some events, a failure of the engine, or the time limit.

        Coroutines that did not end are cancelled; futures belong to the caller.
        """
        waits = [asyncio.ensure_future(event) for event in events]
        await asyncio.wait(
            [*waits, self._failure], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait, event in zip(waits, events, strict=True):
            if wait is not event:
                wait.cancel()


def check_address(host: str, port: int) -> None:
    """Find out whether a server can listen on an address.

    Raises:
      ServerError: it cannot; the message says why.
    """
    address = _address(host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol_number, _, location in found:
            with socket.socket(family, kind, protocol_number) as probe:
                # Connections of a server that has just ended do not count as in use.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(location)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port is in use: got {address}; expected a free port; stop the other server or "
                "choose another port with --port"
            ) from error
        raise ServerError(f"cannot listen on {address}: {error.strerror or error}") from error


def in_daemon_thread[T](function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a thread that does not keep the process alive, and return its future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="load", daemon=True).start()
    return asyncio.wrap_future(future)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
