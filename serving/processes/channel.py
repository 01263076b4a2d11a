"""Messages over one TCP connection between two processes that share a key.

A connection begins with a greeting, in which both sides prove that they know the key. After it each
message is a header (kind, length, sequence number) and a body of bytes. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from typing import NamedTuple

# Raised whenever the meaning of a message changes.
PROTOCOL_VERSION = 1

_MAGIC = b"k3jax"
_NONCE_BYTES = 16
_HEADER = struct.Struct("<B3xIQ")
HEADER_BYTES = _HEADER.size
_GREETING = struct.Struct(f"<{len(_MAGIC)}sB{_NONCE_BYTES}s")
_PROOF_BYTES = hashlib.sha256().digest_size
_MAX_BODY_BYTES = 1 << 28
_GREETING_TIMEOUT_S = 5.0
_RETRY_S = 0.1


class ChannelError(Exception):
    """The peer is gone, or is not one of ours."""


class KeyRefusedError(ChannelError):
    """The peer has another key, or another version of this protocol."""


class Message(NamedTuple):
    """A received message; `kind` is one of `serving.processes.messages.Kind`."""

    kind: int
    sequence: int
    body: bytes


class Channel:
    """A connection after its greeting. `send` may be called by any thread, `receive` by one."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Of the socket, for `select`."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound every later call; a channel on which one has timed out is of no further use."""
        self._socket.settimeout(timeout_s)

    def send(self, kind: int, body: bytes = b"", *, sequence: int = 0) -> None:
        """Send a message; waits while the peer's buffer is full.

        Raises:
          ChannelError: the peer is gone.
        """
        message = _HEADER.pack(kind, len(body), sequence) + body
        try:
            with self._lock:
                self._socket.sendall(message)
        except OSError as error:
            raise ChannelError(f"its connection failed: {error.strerror or error}") from error

    def offer(self, kind: int, body: bytes = b"", *, patience_s: float = 0.0) -> None:
        """Send a small message if the peer's buffer has room for it, else drop it. Never raises.

        Args:
          patience_s: how long another thread's message may take before.
        """
        if not self._lock.acquire(timeout=patience_s):
            return
        try:
            if select.select((), (self._socket,), (), 0)[1]:
                self._socket.sendall(_HEADER.pack(kind, len(body), 0) + body)
        except (OSError, ValueError):
            pass  # whoever receives from this channel notices that it has ended
        finally:
            self._lock.release()

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
          ChannelError: the peer is gone, or sent something else than messages.
        """
        kind, size, sequence = _HEADER.unpack(self._read(_HEADER.size))
        if size > _MAX_BODY_BYTES:
            raise ChannelError(f"it sent a message of {size} bytes")
        return Message(kind, sequence, self._read(size))

    def close(self) -> None:
        """End the connection, and whatever waits in `receive`."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except (OSError, ValueError) as error:
            raise ChannelError(f"its connection failed: {error}") from error
        if len(data) < size:
            raise ChannelError("its connection closed")
        return data


def listen(host: str, port: int) -> socket.socket:
    """Open the port on which host 0 waits for the others; 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def accept(listener: socket.socket, key: bytes) -> Channel:
    """Take a connection that waits, and greet it.

    Raises:
      ChannelError: it is not one of ours.
    """
    connection, _ = listener.accept()
    return _greet(connection, key, (b"leader", b"worker"))


def connect(host: str, port: int, key: bytes, *, timeout_s: float) -> Channel:
    """Connect to host 0, trying again until it is there.

    Raises:
      ChannelError: it did not answer in time.
      KeyRefusedError: it has another key.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(_RETRY_S, end_s - time.monotonic())
            connection = socket.create_connection((host, port), timeout=left_s)
            return _greet(connection, key, (b"worker", b"leader"))
        except KeyRefusedError:
            raise
        except (OSError, ChannelError) as error:
            if time.monotonic() + _RETRY_S >= end_s:
                raise ChannelError(f"no answer within {timeout_s:g} s: {error}") from error
        time.sleep(_RETRY_S)


def _greet(connection: socket.socket, key: bytes, roles: tuple[bytes, bytes]) -> Channel:
    """Prove to each other that both know the key.

    Each side sends a random number and then a digest of both numbers, its role and the key: an old
    answer is of no use, nor is an answer that is sent back.
    """
    own_role, peer_role = roles
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        connection.settimeout(_GREETING_TIMEOUT_S)
        connection.sendall(_GREETING.pack(_MAGIC, PROTOCOL_VERSION, nonce))
        magic, version, peer_nonce = _GREETING.unpack(_exactly(connection, _GREETING.size))
        if magic != _MAGIC:
            raise ChannelError("it does not speak this protocol")
        if version != PROTOCOL_VERSION:
            raise KeyRefusedError(
                f"control protocol differs: got version {version} from the peer; expected "
                f"{PROTOCOL_VERSION}; install the same package everywhere"
            )
        nonces = min(nonce, peer_nonce) + max(nonce, peer_nonce)
        connection.sendall(_proof(key, own_role, nonces))
        if not hmac.compare_digest(
            _exactly(connection, _PROOF_BYTES), _proof(key, peer_role, nonces)
        ):
            raise KeyRefusedError(
                "control key differs: the peer knows another; set the same K3JAX_CONTROL_KEY "
                "everywhere, or none"
            )
        connection.settimeout(None)
        return Channel(connection)
    except OSError as error:
        connection.close()
        raise ChannelError(f"its connection failed: {error}") from error
    except BaseException:
        connection.close()
        raise


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ChannelError("its connection closed")
        data += part
    return data
