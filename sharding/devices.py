"""The devices of this process: their choice before jax starts, and their memory."""

from __future__ import annotations

import os
from collections.abc import Callable

# XLA's CPU client runs simulated devices on a pool of this many threads. Fewer than devices x
# concurrent collectives dead-locks (multihost.md section 1).
_SIMULATION_THREADS = "64"


def prepare_devices(num_devices: int, *, join: Callable[[], None] | None = None) -> str | None:
    """Make `num_devices` devices of this process available, before anything else uses jax.

    On a host without accelerators the CPU stands in for them. On others nothing is simulated, and a
    mesh that is too large is an error when it is built.

    Args:
      join: joins this process to others that share the mesh.

    Returns:
      One line to print when devices are simulated, else None.
    """
    os.environ.setdefault("NPROC", _SIMULATION_THREADS)
    import jax

    jax.config.update("jax_num_cpu_devices", num_devices)
    if join is not None:
        join()
    if jax.default_backend() == "cpu" and (num_devices > 1 or join is not None):
        return f"no accelerator here: simulating {num_devices} devices on the CPU"
    return None


def device_memory() -> tuple[int, int] | None:
    """Bytes of a device's memory and bytes in use, or None where the platform does not tell.

    Of the devices of this process, the one that has the least left.
    """
    import jax

    sizes: list[tuple[int, int]] = []
    for device in jax.local_devices():
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        sizes.append((int(stats["bytes_limit"]), int(stats["bytes_in_use"])))
    return min(sizes, key=lambda size: size[0] - size[1])
