"""Runs the processes of a group, and ends them in time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_bench.groups import Group

_SCRIPTS = Path(__file__).parents[1]
_ROOT = _SCRIPTS.parent
_POLL_S = 0.1
_LAST_LINES = 6
# NVLink multicast can put a shared host's GPUs out of service. NCCL and NVSHMEM may use it by
# themselves; XLA does so only with these flags.
_NO_MULTICAST: Mapping[str, str] = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
_MULTICAST_FLAGS = ("nccl_user_buffers", "symmetric", "nvshmem", "multimem", "nvls")


class ForbiddenFlag(ValueError):
    """The environment asks for something that may use NVLink multicast."""


def check_flags(outer: Mapping[str, str]) -> None:
    """Refuse an environment whose `XLA_FLAGS` may turn multicast on.

    Raises:
      ForbiddenFlag: it does.
    """
    flags = outer.get("XLA_FLAGS", "")
    forbidden = [flag for flag in _MULTICAST_FLAGS if flag in flags.lower()]
    if forbidden:
        raise ForbiddenFlag(
            f"XLA_FLAGS may turn NVLink multicast on: got {flags!r}; expected none of {forbidden}"
        )


def environment(
    group: Group, cache: Path, outer: Mapping[str, str], *, smoke: bool
) -> dict[str, str]:
    """Environment of a group's processes.

    Args:
      cache: folder of compiled programs and of tuned matrix products, shared by all groups.
    """
    flags = outer.get("XLA_FLAGS", "")
    if smoke:
        flags += " --xla_backend_optimization_level=0"  # compilation is most of the time
    path = [str(_SCRIPTS), str(_ROOT), *filter(None, [outer.get("PYTHONPATH")])]
    result = {
        "NPROC": "64",  # threads of simulated devices; fewer can wait for each other forever
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **outer,
        **_NO_MULTICAST,
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": flags.strip(),
    }
    if group.layout == "one_gpu":
        result["CUDA_VISIBLE_DEVICES"] = outer.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return result


def run_group(
    group: Group, folder: Path, cache: Path, *, sizes: str, limit_s: float
) -> list[dict[str, Any]]:
    """Run one group and return its lines, a failure of the whole group included.

    Args:
      folder: for results and logs; they are named after the group.
      sizes: a name of `groups.SIZES`.
      limit_s: seconds after which the processes are killed; what they wrote until then counts.
    """
    out = folder / f"{group.name}.jsonl"
    logs = [folder / f"{group.name}.{index}.log" for index in range(group.num_processes)]
    order = {
        "group": dataclasses.asdict(group),
        "sizes": sizes,
        "out": str(out),
        "coordinator": f"127.0.0.1:{_free_port()}",
    }
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                _process(
                    order | {"process": index},
                    log,
                    environment(group, cache, os.environ, smoke=sizes == "smoke"),
                )
            )
            for index, log in enumerate(logs)
        ]
        failure = _wait(processes, deadline)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if failure:
        where, what = failure
        lines.append(failed(f"{what}: {_last(logs[where])}"))
    return lines


def failed(why: str) -> dict[str, Any]:
    """The line of a group that did not end well."""
    return {"case": "group", "shapes": {}, "failure": why}


@contextlib.contextmanager
def _process(order: Mapping[str, Any], log: Path, env: Mapping[str, str]) -> Any:
    """A worker with its own process group, which ends with the context."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mesh_bench.worker", json.dumps(order)],
            cwd=_ROOT, env=dict(env), stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> tuple[int, str] | None:
    """Wait until all have ended well. Else: which did not, and how."""
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code:
                return index, f"process {index} ended with code {code}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return codes.index(None), "stopped at the time limit"
        time.sleep(_POLL_S)


def _last(log: Path) -> str:
    """The end of a log, on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])[-600:]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
