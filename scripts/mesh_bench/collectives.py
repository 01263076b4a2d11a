"""An all-reduce, an all-gather and a reduce-scatter over all ranks, alone; an operation without.

Arrays are bfloat16; a case's bytes are those of the whole one: the sum, or what is gathered, or
what is scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array
from mesh_bench.arrays import Leaf, fill, normal, whole
from mesh_bench.chains import FEEDBACK, Chain, call_chain, run_chains, zeros
from mesh_bench.groups import Group, Sizes
from mesh_bench.record import Recorder

from sharding.axes import TP, ParallelConfig
from sharding.mesh import make_mesh

_DTYPE = "bfloat16"
_EVERYWHERE, _ROWS, _COLUMNS = PartitionSpec(), PartitionSpec(TP), PartitionSpec(None, TP)
_MOST_ERROR = 1e-2


def run(recorder: Recorder, group: Group) -> None:
    """Time all cases at all sizes."""
    sizes = recorder.sizes
    mesh = make_mesh(ParallelConfig(tp=group.num_devices))
    chains = [call_chain(mesh, sizes.hidden, sizes.chain)]
    for num_bytes in sizes.collective_bytes:
        chains += _chains(mesh, sizes, num_bytes)
    recorder.note("inputs and references are on the devices")
    run_chains(chains, mesh, recorder)


def _chains(mesh: Mesh, sizes: Sizes, num_bytes: int) -> list[Chain]:
    width, ranks = num_bytes // jnp.dtype(_DTYPE).itemsize, mesh.shape[TP]
    leaves = {
        "partials": Leaf((ranks, width), normal(1.0, _DTYPE), _ROWS),
        "columns": Leaf((1, width), normal(1.0, _DTYPE), _COLUMNS),
    }
    arrays = fill(mesh, leaves)

    def case(
        name: str, operation: Callable[[Array], Array], expected: Callable[[Array], Array],
        input_name: str, kind: str | None, spec: PartitionSpec,
    ) -> Chain:  # fmt: skip
        def step(carry: Array, inputs: Mapping[str, Array]) -> Array:
            held = inputs[input_name]
            fed = jnp.tile(carry, (1, held.shape[1] // carry.shape[1]))
            return operation(held + FEEDBACK * fed)

        def reference(held: Mapping[str, Array]) -> Array:
            full = held if kind is None else whole(leaves)
            return expected(full[input_name].astype(jnp.float32))

        return Chain(
            case=f"bare/{name}",
            shapes={"bytes": num_bytes},
            operation=step,
            num_operations=sizes.chain,
            inputs={input_name: arrays[input_name]},
            input_specs={input_name: leaves[input_name].spec},
            carry=zeros(mesh, (1, width), _DTYPE, spec),
            reference=reference,
            most_error=_MOST_ERROR,
            collectives={} if kind is None else {kind: 1},
        )

    def own_columns(x: Array) -> Array:
        size = width // ranks
        return lax.dynamic_slice_in_dim(x, size * lax.axis_index(TP), size, axis=1)

    def sum_of_ranks(x: Array) -> Array:
        return jnp.sum(x, axis=0, keepdims=True)

    def sum_of_parts(x: Array) -> Array:
        return sum_of_ranks(x.reshape(ranks, -1))

    return [
        case("none", lax.optimization_barrier, lambda x: x, "columns", None, _COLUMNS),
        case(
            "all_reduce", lambda x: lax.psum(x, TP), sum_of_ranks,
            "partials", "all-reduce", _EVERYWHERE,
        ),
        case(
            "all_gather", lambda x: sum_of_parts(lax.all_gather(x, TP, axis=1, tiled=True)),
            sum_of_parts, "columns", "all-gather", _COLUMNS,
        ),
        case(
            "reduce_scatter",
            lambda x: lax.psum_scatter(x, TP, scatter_dimension=1, tiled=True),
            lambda x: own_columns(sum_of_ranks(x)), "partials", "reduce-scatter", _COLUMNS,
        ),
    ]  # fmt: skip
