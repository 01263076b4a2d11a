"""A way to host 0's coordination service that does not show its end.

jax's client aborts the process, with lines of its own, as soon as its connection to the service
breaks, which it does when host 0 ends. Through a relay it only finds that nobody answers, which it
bears until its heartbeats have failed for a while. The reason of the end is ours to tell.
"""

from __future__ import annotations

import contextlib
import socket
import threading

_PART_BYTES = 1 << 16


def start_relay(host: str, port: int) -> int:
    """Listen on a free port of loopback for clients of a service, until the process ends.

    Args:
      host, port: of the service. A client that comes before the service is there is sent away.

    Returns:
      The port.
    """
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            client, _ = door.accept()
            threading.Thread(target=_relay, args=(client, host, port), daemon=True).start()

    threading.Thread(target=serve, name="relay", daemon=True).start()
    return door.getsockname()[1]


def _relay(client: socket.socket, host: str, port: int) -> None:
    """Carry bytes both ways until the client ends; the end of the service is kept from it."""
    with client:
        try:
            service = socket.create_connection((host, port), timeout=10.0)
        except OSError:
            return  # the client tries again
        with service:
            service.settimeout(None)
            for end in (client, service):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_carry, args=(service, client), daemon=True).start()
            _carry(client, service)
            with contextlib.suppress(OSError):
                while client.recv(_PART_BYTES):  # the service is gone, nobody hears it
                    pass
            with contextlib.suppress(OSError):
                service.shutdown(socket.SHUT_RDWR)  # wakes the other thread


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Carry bytes one way until either end is gone."""
    with contextlib.suppress(OSError):
        while part := source.recv(_PART_BYTES):
            target.sendall(part)
