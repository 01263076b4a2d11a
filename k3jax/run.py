"""One pass through the model inside a trace: packed inputs in, hidden states and the pool out."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt16

from k3jax import inputs
from k3jax.buckets import Bucket
from k3jax.model import K3, Forward, shards_tokens
from k3jax.program import Params, Program, RowBuffers
from k3jax.step_meta import StepMeta, row_of_token, step_meta
from sharding import collectives


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


def _resolve_tokens(fields: dict[str, Array], buffer: Int32[Array, "R X"]) -> Int32[Array, " T"]:
    """Token ids of the step; those that the host does not know yet come from the token buffer."""
    tokens = fields["tokens"]
    row = row_of_token(fields["row_offsets"], tokens.shape[0])
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32) - fields["row_offsets"][row]
    buffered = buffer[fields["slots"][row], jnp.clip(place, 0, buffer.shape[1] - 1)]
    return jnp.where(tokens == inputs.FROM_DEVICE, buffered, tokens)


@dataclasses.dataclass(frozen=True)
class Run:
    """The model after a forward pass on one rank, inside a trace."""

    model: K3
    params: Params
    tokens: Int32[Array, " T"]
    buffers: RowBuffers
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
        return apply(self.model, self.params, hidden, method="logits")


def run_layers(
    program: Program,
    bucket: Bucket,
    params: Params,
    pool: UInt16[Array, "1 Z P W words"],
    buffers: RowBuffers,
    fields: dict[str, Array],
) -> Run:
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
    tokens = _resolve_tokens(fields, buffers.tokens)
    taps = (program.draft.tap_layers, program.draft.tap_mode) if program.draft else ()
    forward = apply(model, params, tokens, pool[0], meta, layout, *taps)
    is_sharded = shards_tokens(program.parallel, bucket.kind, bucket.tokens)
    return Run(model, params, tokens, buffers, forward, is_sharded, meta)


def apply(model: K3, params: Params, *args: Any, method: str | None = None) -> Any:
    """Call the model. Scopes in a profile are the model's own, without Flax's module names."""
    with nn.override_named_call(False):
        return model.apply({"params": params}, *args, method=method)
