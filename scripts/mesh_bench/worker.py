"""One process of a group; `launch` starts it with the group as a JSON argument."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mesh_bench import groups
from mesh_bench.record import Recorder

from sharding.distributed import ProcessGroup, join

_COORDINATION_S = 60


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    group = groups.Group(**order["group"])
    index: int = order["process"]
    sizes = groups.SIZES[order["sizes"]]
    recorder = Recorder(Path(order["out"]) if index == 0 else None, sizes)
    _start_jax(group, index, order["coordinator"])
    recorder.write({"circumstances": _circumstances()})
    recorder.note("jax has started")
    match group.section:
        case "tails":
            from mesh_bench import tails

            tails.run(recorder, group)
        case "collectives":
            from mesh_bench import collectives

            collectives.run(recorder, group)
        case "dispatch":
            from mesh_bench import experts

            experts.run(recorder, group)
        case "steps" | "layers" | "model":
            from mesh_bench import steps

            steps.run(recorder, group)
    recorder.note("done")


def _start_jax(group: groups.Group, index: int, coordinator: str) -> None:
    """The devices of this process, and its fellow processes."""
    import jax

    jax.config.update("jax_num_cpu_devices", group.devices_per_process)
    if group.num_processes > 1:
        place = ProcessGroup(
            coordinator=coordinator,
            num_processes=group.num_processes,
            process_id=index,
            local_devices=None if jax.config.jax_platforms == "cpu" else [index],
        )
        join(place, timeout_s=_COORDINATION_S)
    if jax.device_count() < group.num_processes * group.devices_per_process:
        raise SystemExit(f"too few devices: got {jax.devices()}")


def _circumstances() -> dict[str, Any]:
    """Devices and versions."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    return {
        "device": {
            "kind": device.device_kind,
            "count": jax.device_count(),
            "backend": " ".join(device.client.platform_version.split()),
        },
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": sys.version.split()[0],
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


if __name__ == "__main__":
    main()
