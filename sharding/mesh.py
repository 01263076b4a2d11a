"""The device mesh."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding.axes import DP, TP, ParallelConfig

# Programs are traced and lowered for an abstract mesh, and run on a real one.
AnyMesh = Mesh | AbstractMesh


def make_mesh(parallel: ParallelConfig) -> Mesh:
    """A `(dp, tp)` mesh over the first devices of the default platform.

    Raises:
      ValueError: the platform has fewer devices than the mesh needs.
    """
    devices = jax.devices()
    if len(devices) < parallel.num_ranks:
        raise ValueError(
            f"mesh needs more devices: got {len(devices)} {devices[0].platform} devices; expected "
            f"{parallel.num_ranks} for dp{parallel.dp}xtp{parallel.tp}"
        )
    return jax.make_mesh(
        (parallel.dp, parallel.tp),
        (DP, TP),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[: parallel.num_ranks],
    )
