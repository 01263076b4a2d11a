"""The other processes of a group on one machine, which `serve.py --processes` starts itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from serving.processes.place import LOCAL_PROCESS, Place

CONTROL_KEY = "K3JAX_CONTROL_KEY"
_PARENT = "K3JAX_PARENT"
_PR_SET_PDEATHSIG = 1
_END_S = 1.0  # for children to end by themselves


class Children:
    """Processes that end when this one does, and whose lines appear among its own."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], host_id: int, environment: Mapping[str, str]) -> None:
        """Start a process. The thread that calls this must live as long as the process should."""
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            reader = threading.Thread(
                target=self._copy, args=(source, target, f"[host {host_id}] "), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def finish(self) -> None:
        """Wait a moment until all have ended by themselves, and kill the others."""
        end_s = time.monotonic() + _END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
            if process.poll() is None:
                process.kill()
        for reader in self._readers:
            reader.join(max(0.1, end_s - time.monotonic()))

    def _copy(self, source: IO[str], target: IO[str], prefix: str) -> None:
        for line in source:
            with self._lock, contextlib.suppress(OSError, ValueError):
                target.write(f"{prefix}{line.rstrip()}\n")
                target.flush()


def start_children(place: Place, environment: Mapping[str, str]) -> Children:
    """Start the other processes of this machine with the command line of this one.

    Args:
      place: of this process, with its ports chosen.
      environment: of this process, with the group's key.
    """
    children = Children()
    for index in range(1, place.local_count) if place.local_index == 0 else ():
        host_id = place.host_id + index
        flags = {
            "--coordinator": place.coordinator,
            "--control-port": place.control_port,
            "--num-hosts": place.num_hosts,
            "--host-id": host_id,
            "--processes": 1,
        }
        words = [word for name, value in flags.items() for word in (name, str(value))]
        settings = {LOCAL_PROCESS: f"{index}/{place.local_count}", _PARENT: str(os.getpid())}
        command = [sys.executable, *sys.orig_argv[1:], *words]
        children.start(command, host_id, dict(environment) | settings)
    return children


def die_with_parent(environment: Mapping[str, str]) -> None:
    """If this process was started by `start_children`, let the system kill it after its parent."""
    if _PARENT not in environment or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(environment[_PARENT]):  # it has ended already
        os._exit(1)


def choose_key(place: Place, environment: Mapping[str, str]) -> str:
    """The key that the processes of a group share.

    Without one in the environment, a group on one machine draws it. Others derive it from the
    coordinator's address: that keeps groups apart by mistake, not by intent.
    """
    if CONTROL_KEY in environment:
        return environment[CONTROL_KEY]
    if place.coordinator_port == 0:
        return secrets.token_hex(16)
    return f"k3jax {place.coordinator}"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
