"""Joining of this process to the others that share a mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

# jax notices lost processes too, but by ending this one without a word. The server's own watch is
# to be faster by far.
_HEARTBEAT_TIMEOUT_S = 60
_SHUTDOWN_TIMEOUT_S = 5
# By default each process measures a part of the kernels' variants and waits for the others'
# results; one that finds its program in the compilation cache never sends any.
# A collective whose peer is gone may hang for ever (multihost.md section 2).
_XLA_FLAGS = {
    "--xla_gpu_shard_autotuning": "false",
    "--xla_cpu_collective_timeout_seconds": "60",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Processes that share a mesh, and this one's place among them.

    Attributes:
      coordinator: `host:port` on the machine of process 0.
      local_devices: ids of the machine's devices that this process uses; None means all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: Sequence[int] | None = None


def join(group: ProcessGroup, *, timeout_s: float) -> None:
    """Join the group, before jax is used for anything else.

    Args:
      timeout_s: for all to come.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in _XLA_FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    import jax

    # It would take SIGTERM away from the server.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, _, port = group.coordinator.rpartition(":")
    is_local = host in ("127.0.0.1", "localhost", "[::1]")
    jax.distributed.initialize(
        coordinator_address=group.coordinator,
        num_processes=group.num_processes,
        process_id=group.process_id,
        local_device_ids=group.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(timeout_s)),
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
        coordinator_bind_address=group.coordinator if is_local else f"[::]:{port}",
    )
