"""What an operator brings to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

COPY_BYTES_PER_S = 4.3e12  # device copy on an H200, read plus written
BF16_FLOPS = 790e12  # large matrix product on an H200


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arguments of a case on the device, and what they cost at least.

    | field | meaning |
    |---|---|
    | `call` | (implementation, one of `inputs`, weights) -> output, traceable |
    | `inputs` | several sets of arguments, so that no call finds its data in a cache |
    | `weights` | what all sets share |
    | `num_bytes` | bytes that one call must move, the mean over the sets |
    | `num_flops` | operations of one call |
    """

    call: Callable[..., jax.Array]
    inputs: list[tuple[jax.Array, ...]]
    weights: tuple[object, ...]
    num_bytes: float
    num_flops: float

    @property
    def floor_s(self) -> float:
        """No call can be faster."""
        return max(self.num_bytes / COPY_BYTES_PER_S, self.num_flops / BF16_FLOPS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: an operator at one shape.

    | field | meaning |
    |---|---|
    | `op`, `shape` | name of the operator, and of the shape |
    | `build` | makes the arguments on the device |
    | `implementations` | what to time; the first is what the others' outputs are compared with; |
    | | `mosaic+pdl` is a kernel with programmatic dependent launch |
    | `peers` | other projects' kernels by name: functions that time the same work, each in a |
    | | process of its own, and return `us`, `us_min` and `us_max`; an ImportError skips one |
    | `tolerance` | limit of max abs(difference) / max abs(output) |
    | `limit_s` | time that the case may take in a process of its own |
    """

    op: str
    shape: str
    build: Callable[[], Work]
    implementations: tuple[str, ...] = ("xla", "mosaic", "mosaic+pdl")
    peers: Mapping[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    tolerance: float = 1e-2
    limit_s: float = 90.0
    smoke: bool = field(default=False)

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.op}/{self.shape}"
