"""Chains of dependent operations, each chain one program: compiled together, checked, timed.

Operations are unrolled, as the layers of a step are. Each takes what the one before gave, so none
can be dropped, moved out, or run before its turn.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from mesh_bench.arrays import Leaf, fill, normal
from mesh_bench.groups import Sizes
from mesh_bench.record import Recorder
from mesh_bench.timing import check_values, sample

FEEDBACK = 2.0**-10  # of a result, in the input of the next operation
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)"
    r"(?:-start)?\("
)

# Carry and inputs -> the next carry, on one rank.
Operation = Callable[[Array, Mapping[str, Array]], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """One case.

    Attributes:
      inputs: arrays on the mesh; the same in all operations.
      carry: what the first operation gets: zeros.
      reference: inputs of a rank -> what its first operation should give, in float32; None where
        there is nothing to check.
      collectives: of one operation, as they are written.
    """

    case: str
    shapes: Mapping[str, Any]
    operation: Operation
    num_operations: int
    inputs: Mapping[str, jax.Array]
    input_specs: Mapping[str, PartitionSpec]
    carry: jax.Array
    reference: Callable[[Mapping[str, Array]], Array] | None
    most_error: float
    collectives: Mapping[str, int]


def run_chains(chains: Sequence[Chain], mesh: Mesh, recorder: Recorder) -> None:
    """Compile all chains, several at a time; then check and time one after the other."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        programs = [threads.submit(_compile, chain, mesh) for chain in chains]
        references = [threads.submit(_compile_reference, chain, mesh) for chain in chains]
    recorder.note(f"{len(chains)} chains are compiled")
    for chain, program, reference in zip(chains, programs, references, strict=True):
        with recorder.case(chain.case, chain.shapes) as line:
            _measure(chain, program.result(), reference.result(), recorder.sizes, line)


def _measure(
    chain: Chain,
    program: jax.stages.Compiled,
    reference: jax.stages.Compiled | None,
    sizes: Sizes,
    line: dict[str, Any],
) -> None:
    inputs = dict(chain.inputs)
    line["collectives"] = count_collectives(program.as_text())
    line["collectives_as_written"] = are_as_written(
        line["collectives"], chain.collectives, chain.num_operations
    )
    if reference is not None:
        first, _ = program(chain.carry, inputs)
        line["error"] = check_values(first, reference(inputs), most_error=chain.most_error)
    seconds = sample(
        lambda: program(chain.carry, inputs), target_s=sizes.chain_s, most=sizes.most_samples
    )
    line["unit"], line["operations"] = "us", chain.num_operations
    line["samples"] = [value * 1e6 / chain.num_operations for value in seconds]


def _compile(chain: Chain, mesh: Mesh) -> jax.stages.Compiled:
    """`(carry, inputs) -> (first result, last result)`."""

    def run(carry: Array, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
        first = carry = chain.operation(carry, inputs)
        for _ in range(chain.num_operations - 1):
            carry = chain.operation(carry, inputs)
        return first, carry

    carry_spec = chain.carry.sharding.spec
    run.__name__ = chain.case.replace("/", "_")  # the program's name in a profile
    program = jax.shard_map(
        run, mesh=mesh, in_specs=(carry_spec, dict(chain.input_specs)),
        out_specs=(carry_spec, carry_spec), check_vma=False,
    )  # fmt: skip
    return jax.jit(program).lower(chain.carry, dict(chain.inputs)).compile()


def _compile_reference(chain: Chain, mesh: Mesh) -> jax.stages.Compiled | None:
    """`inputs -> what the first operation should give`."""
    if chain.reference is None:
        return None
    program = jax.shard_map(
        chain.reference, mesh=mesh, in_specs=(dict(chain.input_specs),),
        out_specs=chain.carry.sharding.spec, check_vma=False,
    )  # fmt: skip
    return jax.jit(program).lower(dict(chain.inputs)).compile()


def count_collectives(hlo: str) -> dict[str, int]:
    """Collectives of an optimised program, by kind."""
    return dict(Counter(_COLLECTIVE.findall(hlo)))


def are_as_written(
    found: Mapping[str, int], written: Mapping[str, int], num_operations: int
) -> bool:
    """Whether each operation has its collectives; those of one kind may have become one."""
    return found.keys() == written.keys() and all(
        num_operations <= found[kind] <= num_operations * count for kind, count in written.items()
    )


def zeros(mesh: Mesh, shape: tuple[int, ...], dtype: str, spec: PartitionSpec) -> jax.Array:
    """A carry to begin with."""
    sharding = NamedSharding(mesh, spec)
    local = np.zeros(sharding.shard_shape(shape), jnp.dtype(dtype))
    return jax.make_array_from_callback(shape, sharding, lambda _: local)


def call_chain(mesh: Mesh, width: int, num_operations: int) -> Chain:
    """Operations that fuse into one kernel: what a call of a program costs."""
    spec = PartitionSpec()
    inputs = fill(mesh, {"x": Leaf((1, width), normal(1.0, "float32"), spec)})
    return Chain(
        case="call", shapes={}, num_operations=num_operations, inputs=inputs,
        operation=lambda carry, inputs: inputs["x"] + FEEDBACK * carry,
        input_specs={"x": spec}, carry=zeros(mesh, (1, width), "float32", spec),
        reference=None, most_error=0.0, collectives={},
    )  # fmt: skip
