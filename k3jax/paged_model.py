"""A loaded model with its pool: what the host calls to run one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from k3jax.buckets import Bucket
from k3jax.compile import (
    compile_clearing,
    compile_controlling,
    compile_copying,
    compile_masking,
    compile_steps,
    initial_state,
)
from k3jax.program import Program
from k3jax.step import CLEAR_WIDTH, COPY_WIDTH, MakeStep

ParamArrays = Mapping[str, Mapping[str, jax.Array]]


class PagedModel:
    """Parameters, page pool and row buffers on the mesh, and the compiled programs that use them.

    Calls return at once and run on the devices in call order. Pool and row buffers are donated to
    every step, so this object is their only owner. Used by one thread.

    Args:
      make_step: `serving_step` or `scoring_step`; decides what `run` returns.
      on_compiled: told each compiled bucket and the seconds it took.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        params: ParamArrays,
        make_step: MakeStep,
        buckets: Iterable[Bucket],
        *,
        on_compiled: Callable[[Bucket, float], None] = lambda bucket, seconds: None,
    ):
        self.program = program
        self._params = params
        self._steps = compile_steps(make_step, program, mesh, buckets, on_compiled=on_compiled)
        self._clear = compile_clearing(program, mesh)
        self._copy = compile_copying(program, mesh)
        self._control = compile_controlling(program, mesh)
        self._mask = compile_masking(program, mesh)
        self.pool, self._buffers = initial_state(program, mesh)

    def clear(self, pages: Sequence[Sequence[int]]) -> None:
        """Zero some pages of each replica, in every layer position."""
        for start in range(0, max(map(len, pages)), CLEAR_WIDTH):
            ids = np.full((len(pages), CLEAR_WIDTH), self.program.layout.num_pages, np.int32)
            for row, of_replica in zip(ids, pages, strict=True):
                part = of_replica[start : start + CLEAR_WIDTH]
                row[: len(part)] = part
            self.pool = self._clear(self.pool, ids)

    def copy(self, copies: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Copy the first tokens of pages of each replica in every layer position, bit by bit.

        Args:
          copies: source page, target page and number of tokens. No page is the target of two
            copies, or both source and target.
        """
        for start in range(0, max(map(len, copies)), COPY_WIDTH):
            shape = (len(copies), 3, COPY_WIDTH)
            packed = np.full(shape, self.program.layout.num_pages, np.int32)
            for columns, of_replica in zip(packed, copies, strict=True):
                part = of_replica[start : start + COPY_WIDTH]
                if part:
                    columns[:, : len(part)] = np.transpose(part)
            self.pool = self._copy(self.pool, packed)

    def control(self, call: Int32[np.ndarray, "dp n"]) -> None:
        """Set the sampling controls of one row of each replica; see `k3jax.controls.calls`."""
        counts, biases = self._control(self._buffers.counts, self._buffers.biases, call)
        self._buffers = self._buffers._replace(counts=counts, biases=biases)

    def mask(self, call: Int32[np.ndarray, "dp rows n"]) -> None:
        """Set masks of some rows of each replica; see `k3jax.controls.mask_calls`."""
        self._buffers = self._buffers._replace(masks=self._mask(self._buffers.masks, call))

    def run(self, bucket: Bucket, packed: Int32[np.ndarray, "dp n"]) -> Any:
        """Run one step on packed inputs, which must not be changed afterwards (KF-C20).

        Returns:
          What the step gives the host: arrays on the devices.
        """
        self.pool, self._buffers, result = self._steps[bucket](
            self._params, self.pool, self._buffers, packed
        )
        return result
