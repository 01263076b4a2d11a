"""From logical axes to the mesh: the one table of what is split over what.

Letters and logical axis names are those of the parameter description; see `RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.axes import DP, TP, ParallelConfig

MeshAxes = str | tuple[str, ...] | None


def rules(parallel: ParallelConfig) -> dict[str, MeshAxes]:
    """Logical axis -> mesh axes it is split over (k3-model.md section 5.2)."""
    whole = parallel.experts == "ep"
    return {
        "vocab": TP,
        "heads": TP,
        "ff": TP,
        "expert": (DP, TP) if whole else None,
        "expert_ff": None if whole else (DP, TP),
        "ranks": (DP, TP),
        "replicas": DP,
    }


def partition_spec(axes: Sequence[str | None], parallel: ParallelConfig) -> PartitionSpec:
    """The `PartitionSpec` of an array with these logical axes.

    Raises:
      ValueError: an axis has no rule, or two dims would land on the same mesh axis.
    """
    table, dims, used = rules(parallel), [], set()
    for axis in axes:
        if axis is not None and axis not in table:
            raise ValueError(
                f"logical axis is unknown: got {axis!r}; expected one of {sorted(table)}"
            )
        mesh_axes = None if axis is None else table[axis]
        for name in (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ():
            if name in used:
                raise ValueError(f"mesh axis {name!r} would split two dims: got axes {tuple(axes)}")
            used.add(name)
        dims.append(mesh_axes)
    return PartitionSpec(*dims)


def local_shape(
    shape: Sequence[int], axes: Sequence[str | None], parallel: ParallelConfig
) -> tuple[int, ...]:
    """Shape of one rank's part.

    Raises:
      ValueError: a split dim does not divide.
    """
    sizes = {DP: parallel.dp, TP: parallel.tp}
    local = []
    for dim, mesh_axes in zip(shape, partition_spec(axes, parallel), strict=True):
        ranks = 1
        for name in (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ():
            ranks *= sizes[name]
        if dim % ranks:
            raise ValueError(
                f"dim does not divide: got {dim} of {tuple(shape)}; expected {ranks} parts"
            )
        local.append(dim // ranks)
    return tuple(local)


def named_sharding(
    axes: Sequence[str | None], parallel: ParallelConfig, mesh: Mesh
) -> NamedSharding:
    """The sharding of an array with these logical axes on `mesh`."""
    return NamedSharding(mesh, partition_spec(axes, parallel))
