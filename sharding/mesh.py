"""The device mesh."""

from __future__ import annotations

import itertools

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding.axes import DP, TP, ParallelConfig

# Programs are traced and lowered for an abstract mesh, and run on a real one.
AnyMesh = Mesh | AbstractMesh


def make_mesh(parallel: ParallelConfig) -> Mesh:
    """A `(dp, tp)` mesh over the first devices of the default platform.

    With several processes each gives the same number of devices, and ranks are counted through the
    devices of process 0, then those of process 1, and so on: neighbours on `tp` are on one machine.

    Raises:
      ValueError: the platform has fewer devices than the mesh needs, or a process has.
    """
    num_processes = jax.process_count()
    if parallel.num_ranks % num_processes:
        raise ValueError(
            f"mesh does not divide over the processes: got {parallel.num_ranks} devices; expected "
            f"a multiple of {num_processes}"
        )
    share = parallel.num_ranks // num_processes
    ordered = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices, problems = [], []
    for process, group in itertools.groupby(ordered, lambda device: device.process_index):
        own = list(group)
        devices += own[:share]
        if len(own) < share:
            where = f" in process {process}" if num_processes > 1 else ""
            problems.append(f"got {len(own)} {own[0].platform} devices{where}")
    if problems:
        raise ValueError(
            f"mesh needs more devices: {', '.join(problems)}; expected {share} for "
            f"dp{parallel.dp}xtp{parallel.tp}"
            + (f" over {num_processes} processes" if num_processes > 1 else "")
        )
    return jax.make_mesh(
        (parallel.dp, parallel.tp),
        (DP, TP),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )
