"""The jitted programs of a step: one `shard_map` around the whole model.

A serving step takes parameters, the donated pool, the donated token buffer and one packed int32
array; it returns the pool, the token buffer and one small int32 array. A scoring step returns the
logits of every token instead. All replicas of the mesh run the same program, each on its own row of
the packed array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, UInt16

from k3jax import inputs
from k3jax.buckets import Bucket
from k3jax.cache_spec import layer_groups
from k3jax.config import Dtype, ModelConfig
from k3jax.draft.acceptance import verify
from k3jax.model import K3, Forward, shards_tokens
from k3jax.params import describe
from k3jax.pool import PoolLayout, clear_pages, copy_pages
from k3jax.sampling import sample
from k3jax.step_meta import StepMeta, last_token_of_row, row_of_token, step_meta
from pallas_kernels.settings import AUTOMATIC, KernelSettings, using
from sharding import collectives
from sharding.axes import ParallelConfig
from sharding.mesh import AnyMesh
from sharding.specs import partition_spec

Params = Mapping[str, Mapping[str, Array]]
CLEAR_WIDTH = 16  # pages that one call of the clearing program takes
COPY_WIDTH = 4  # copies that one call of the copying program takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What the step programs are compiled for. Hashable: everything here is static.

    Attributes:
      max_rows: entries of a replica's token buffer; one more is scratch, for rows not in use.
      kernels: which implementations the operators take.
    """

    cfg: ModelConfig
    parallel: ParallelConfig
    layout: PoolLayout
    dtype: Dtype
    max_rows: int
    kernels: KernelSettings = AUTOMATIC

    @property
    def num_recurrent_groups(self) -> int:
        return sum(group.kind == "recurrent" for group in layer_groups(self.cfg))

    @property
    def param_specs(self) -> dict[str, dict[str, PartitionSpec]]:
        """`PartitionSpec` of each parameter."""
        return {
            part: {name: partition_spec(spec.axes, self.parallel) for name, spec in params.items()}
            for part, params in describe(self.cfg).items()
        }

    @property
    def pool_spec(self) -> PartitionSpec:
        return partition_spec(("ranks", None, None, None, None), self.parallel)

    @property
    def buffer_spec(self) -> PartitionSpec:
        """Of the token buffer `[dp * (max_rows + 1)]`."""
        return partition_spec(("replicas",), self.parallel)


MakeStep = Callable[[Program, AnyMesh, Bucket], jax.stages.Wrapped]


def serving_step(program: Program, mesh: AnyMesh, bucket: Bucket) -> jax.stages.Wrapped:
    """The jitted step of a bucket.

    Returns:
      `(params, pool, tokens, packed) -> (pool, tokens, result)` with pool and token buffer donated.
      `packed` is int32 `[dp, n]`; `result` is described in `k3jax.results`.
    """

    def step(params: Params, pool: Array, buffer: Array, packed: Array) -> tuple[Array, ...]:
        fields = unpack(packed[collectives.replica()], bucket, program.num_recurrent_groups)
        run = _run(program, bucket, params, pool, buffer, fields)
        if bucket.num_drafts:
            return _verified(program, run, fields, buffer)
        logits = run.logits(run.take(last_token_of_row(run.meta.row_offsets)))
        with jax.named_scope("sample"):
            ids, finite = sample(
                logits,
                fields["temperature"],
                fields["top_k"],
                fields["top_p"],
                fields["seeds"],
                run.meta.context,
            )
        wanted = (fields["sample"] != 0) & (run.meta.context > 0)
        slots = jnp.where(wanted, fields["slots"], program.max_rows)
        buffer = buffer.at[slots].set(ids, mode="drop")
        result = jnp.concatenate([ids, finite.astype(jnp.int32), run.load])
        with jax.named_scope("result"):
            return run.pool, buffer, collectives.gather_replicas(result)

    return _jit(program, mesh, bucket, step, PartitionSpec())


def scoring_step(program: Program, mesh: AnyMesh, bucket: Bucket) -> jax.stages.Wrapped:
    """The jitted forward pass of a bucket that returns logits of all its tokens.

    Returns:
      `(params, pool, tokens, packed) -> (pool, tokens, logits)`; `packed` is int32 `[dp, n]`,
      `logits` float32 `[dp, T, V]`.
    """

    def step(params: Params, pool: Array, buffer: Array, packed: Array) -> tuple[Array, ...]:
        fields = unpack(packed[collectives.replica()], bucket, program.num_recurrent_groups)
        run = _run(program, bucket, params, pool, buffer, fields)
        return run.pool, buffer, run.logits(run.all())[None]

    return _jit(program, mesh, bucket, step, partition_spec(("replicas",), program.parallel))


def clearing_step(program: Program, mesh: AnyMesh) -> jax.stages.Wrapped:
    """The jitted program that zeroes up to `CLEAR_WIDTH` pages of each replica.

    It is a program of its own, since most steps hand out no page. The device runs programs in the
    order in which they were called, so a page is clear before the step that first writes it.

    Returns:
      `(pool, pages) -> pool`, with the pool donated; `pages` is int32 `[dp, CLEAR_WIDTH]`.
    """
    return _page_step(program, mesh, clear_pages)


def copying_step(program: Program, mesh: AnyMesh) -> jax.stages.Wrapped:
    """The jitted program that copies the first tokens of up to `COPY_WIDTH` pages of each replica.

    Each rank copies its own part of a page. A program of its own for the same reason as
    `clearing_step`; call it after that and before the step.

    Returns:
      `(pool, copies) -> pool`, with the pool donated; `copies` is int32 `[dp, 3, COPY_WIDTH]`, see
      `k3jax.pool.copy_pages`.
    """
    return _page_step(program, mesh, copy_pages)


def _page_step(
    program: Program, mesh: AnyMesh, change: Callable[[Array, Array], Array]
) -> jax.stages.Wrapped:
    """The jitted program that changes pages of each rank as its replica's part of an array says."""
    in_specs = (program.pool_spec, PartitionSpec())

    def step(
        pool: UInt16[Array, "1 Z P W words"], pages: Int32[Array, "dp ..."]
    ) -> UInt16[Array, "1 Z P W words"]:
        return change(pool[0], pages[collectives.replica()])[None]

    step.__name__ = change.__name__  # the program's name in a profile
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=in_specs, out_specs=program.pool_spec, check_vma=False
        ),
        donate_argnums=0,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=NamedSharding(mesh, program.pool_spec),
    )


def unpack(
    packed: Int32[Array, " n"], bucket: Bucket, num_recurrent_groups: int
) -> dict[str, Array]:
    """The arrays of `StepInputs` from the packed buffer."""
    fields = {}
    for field, offset, shape in inputs.spans(bucket, num_recurrent_groups):
        size = 1
        for dim in shape:
            size *= dim
        words = packed[offset : offset + size].reshape(shape)
        fields[field.name] = lax.bitcast_convert_type(words, field.dtype)
    return fields


def _resolve_tokens(fields: dict[str, Array], buffer: Int32[Array, " R"]) -> Int32[Array, " T"]:
    """Token ids of the step; those that the host does not know yet come from the token buffer."""
    tokens = fields["tokens"]
    slot = fields["slots"][row_of_token(fields["row_offsets"], tokens.shape[0])]
    return jnp.where(tokens == inputs.FROM_DEVICE, buffer[slot], tokens)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The model after a forward pass on one rank, inside a trace."""

    model: K3
    params: Params
    tokens: Int32[Array, " T"]
    forward: Forward
    is_sharded: bool
    meta: StepMeta

    @property
    def hidden(self) -> Float[Array, "t H"]:
        return self.forward.hidden

    @property
    def pool(self) -> UInt16[Array, "1 Z P W words"]:
        return self.forward.pool[None]

    @property
    def load(self) -> Int32[Array, " R"]:
        return self.forward.load

    def take(self, tokens: Int32[Array, " S"]) -> Float[Array, "S H"]:
        """Hidden states of some tokens."""
        if self.is_sharded:
            with jax.named_scope("head"):
                return collectives.take_tokens(self.hidden, tokens)
        return jnp.take(self.hidden, tokens, axis=0)

    def all(self) -> Float[Array, "T H"]:
        """Hidden states of all tokens."""
        return collectives.gather_tokens(self.hidden) if self.is_sharded else self.hidden

    def logits(self, hidden: Float[Array, "S H"]) -> Float32[Array, "S V"]:
        return _apply(self.model, self.params, hidden, method="logits")


def _run(
    program: Program,
    bucket: Bucket,
    params: Params,
    pool: UInt16[Array, "1 Z P W words"],
    buffer: Int32[Array, " R"],
    fields: dict[str, Array],
) -> _Run:
    """Run all layers on one rank."""
    layout = program.layout
    meta = step_meta(
        bucket,
        fields["row_offsets"],
        fields["computed"],
        fields["attention_pages"],
        fields["state_source"],
        fields["state_target"],
        fields["export_tokens"],
        fields["export_pages"],
        page_tokens=layout.page_tokens,
        num_pages=layout.num_pages,
    )
    model = K3(program.cfg, program.parallel, program.dtype)
    tokens = _resolve_tokens(fields, buffer)
    forward = _apply(model, params, tokens, pool[0], meta, layout)
    is_sharded = shards_tokens(program.parallel, bucket.kind, bucket.tokens)
    return _Run(model, params, tokens, forward, is_sharded, meta)


def _verified(
    program: Program, run: _Run, fields: Mapping[str, Array], buffer: Int32[Array, " R"]
) -> tuple[Array, ...]:
    """End of a step with drafts: which of them stay, the states after these, the next tokens."""
    meta = run.meta
    rows, slots = meta.lengths.shape[0], 1 + meta.num_drafts
    hidden = meta.to_slots(run.all())
    logits = run.logits(hidden.reshape(rows * slots, -1)).reshape(rows, slots, -1)
    is_used = jnp.arange(slots)[None] < meta.lengths[:, None]
    finite = jnp.all(jnp.isfinite(logits) | ~is_used[:, :, None], axis=(1, 2))
    drafts = meta.to_slots(run.tokens)[:, 1:]
    with jax.named_scope("accept"):
        verdict = verify(
            logits,
            drafts,
            jnp.maximum(meta.lengths - 1, 0),
            fields["temperature"],
            fields["top_k"],
            fields["top_p"],
            fields["seeds"],
            meta.computed + 1,
        )
    staying = jnp.where(meta.lengths > 0, 1 + verdict.num_drafts, 0)
    pool = _apply(
        run.model, run.params, run.forward.trials, staying, run.forward.pool, meta, method="commit"
    )
    wanted = (fields["sample"] != 0) & (meta.lengths > 0)
    scratch = jnp.where(wanted, fields["slots"], program.max_rows)
    buffer = buffer.at[scratch].set(verdict.next_token, mode="drop")
    result = jnp.concatenate(
        [
            verdict.next_token,
            finite.astype(jnp.int32),
            verdict.num_drafts,
            drafts.reshape(-1),
            run.forward.load,
        ]
    )
    with jax.named_scope("result"):
        return pool[None], buffer, collectives.gather_replicas(result)


def _apply(model: K3, params: Params, *args: Any, method: str | None = None) -> Any:
    """Call the model. Scopes in a profile are the model's own, without Flax's module names."""
    with nn.override_named_call(False):
        return model.apply({"params": params}, *args, method=method)


def _jit(
    program: Program,
    mesh: AnyMesh,
    bucket: Bucket,
    step: Callable[..., tuple[Array, ...]],
    result_spec: PartitionSpec,
) -> jax.stages.Wrapped:
    """`shard_map` and jit a step: explicit shardings in and out, pool and token buffer donated."""
    in_specs = (program.param_specs, program.pool_spec, program.buffer_spec, PartitionSpec())
    out_specs = (program.pool_spec, program.buffer_spec, result_spec)

    def shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def traced(*args: Any) -> tuple[Array, ...]:
        with using(program.kernels):
            return step(*args)

    traced.__name__ = f"{bucket.kind}_step"  # the program's name in a profile
    return jax.jit(
        jax.shard_map(traced, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False),
        donate_argnums=(1, 2),
        in_shardings=shardings(in_specs),
        out_shardings=shardings(out_specs),
    )
