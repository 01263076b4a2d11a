"""The devices of this process: their choice before jax starts, and their memory."""

from __future__ import annotations

import os

# XLA's CPU client runs simulated devices on a pool of this many threads. Fewer than devices x
# concurrent collectives dead-locks (multihost.md section 1).
_SIMULATION_THREADS = "64"


def prepare_devices(num_ranks: int) -> str | None:
    """Make `num_ranks` devices available; call it before anything else uses jax.

    On a host without accelerators the CPU stands in for them. On others nothing is simulated, and a
    mesh that is too large is an error when it is built.

    Returns:
      One line to print when devices are simulated, else None.
    """
    os.environ.setdefault("NPROC", _SIMULATION_THREADS)
    import jax

    jax.config.update("jax_num_cpu_devices", num_ranks)
    if jax.default_backend() == "cpu" and num_ranks > 1:
        return f"no accelerator here: simulating {num_ranks} devices on the CPU"
    return None


def device_memory() -> tuple[int, int] | None:
    """Bytes of one device's memory and bytes in use, or None where the platform does not tell."""
    import jax

    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
