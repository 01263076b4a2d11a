"""What a server's step programs are compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from k3jax.cache_spec import layer_groups
from k3jax.config import DraftSampling, Dtype, ModelConfig
from k3jax.controls import MAX_BIASES, mask_words
from k3jax.draft.cache import DraftCache
from k3jax.draft.config import DraftConfig
from k3jax.param_spec import ParamTree
from k3jax.params import describe
from k3jax.pool import PoolLayout
from pallas_kernels.settings import AUTOMATIC, KernelSettings
from sharding.axes import ParallelConfig
from sharding.specs import partition_spec

Params = Mapping[str, Mapping[str, Array]]
DRAFT_PREFIX = "draft/"


class RowBuffers(NamedTuple):
    """What the device keeps of each row between steps: arrays, or something of each.

    Attributes:
      tokens: int32 [R, X]: newest token, then the drafts of those behind it.
      scores: float32 [R, N, V]: log probabilities that each draft was drawn from; N is 0 where
        drafts are certain.
      counts, biases, masks: see `k3jax.controls`.
    """

    tokens: Any
    scores: Any
    counts: Any
    biases: Any
    masks: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What the step programs are compiled for. Hashable: everything here is static.

    Attributes:
      max_rows: entries of a replica's row buffers; one more is scratch, for rows not in use.
      draft: a draft model, which leaves `num_drafts` tokens behind the newest one in the buffer.
      draft_sampling: whether it takes its likeliest tokens or, at a temperature, draws them.
      kernels: which implementations the operators take.
    """

    cfg: ModelConfig
    parallel: ParallelConfig
    layout: PoolLayout
    dtype: Dtype
    max_rows: int
    kernels: KernelSettings = AUTOMATIC
    draft: DraftConfig | None = None
    num_drafts: int = 0
    draft_sampling: DraftSampling = "greedy"

    @property
    def num_recurrent_groups(self) -> int:
        return sum(group.kind == "recurrent" for group in layer_groups(self.cfg))

    @property
    def tree(self) -> ParamTree:
        """Descriptions of all parameters; those of the draft are named `draft/...`."""
        parts = dict(describe(self.cfg))
        if self.draft is not None:
            draft = describe(self.draft).items()
            parts |= {f"{DRAFT_PREFIX}{part}": specs for part, specs in draft}
        return parts

    @property
    def draft_cache(self) -> DraftCache:
        """Where the draft's context lies. Only with a draft."""
        assert self.draft is not None
        return DraftCache(
            first=len(self.cfg.mla_layers),
            target_width=self.cfg.mla_entry_width,
            width=self.draft.entry_width(self.parallel.tp),
            dtype=self.dtype,
        )

    @property
    def buffers(self) -> RowBuffers:
        """Abstract row buffers of all replicas."""
        rows = self.parallel.dp * (self.max_rows + 1)
        scored = self.num_drafts if self.draft_sampling == "probabilistic" else 0
        return RowBuffers(
            jax.ShapeDtypeStruct((rows, 1 + self.num_drafts), jnp.int32),
            jax.ShapeDtypeStruct((rows, scored, self.cfg.vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((rows, self.cfg.vocab_size), jnp.int32),
            jax.ShapeDtypeStruct((rows, 3, MAX_BIASES), jnp.int32),
            jax.ShapeDtypeStruct((rows, mask_words(self.cfg.vocab_size)), jnp.int32),
        )

    @property
    def param_specs(self) -> dict[str, dict[str, PartitionSpec]]:
        """`PartitionSpec` of each parameter."""
        return {
            part: {name: partition_spec(spec.axes, self.parallel) for name, spec in params.items()}
            for part, params in self.tree.items()
        }

    @property
    def pool_spec(self) -> PartitionSpec:
        return partition_spec(("ranks", None, None, None, None), self.parallel)

    @property
    def buffer_specs(self) -> RowBuffers:
        """`PartitionSpec` of each row buffer."""
        flat = partition_spec(("replicas", None), self.parallel)
        deep = partition_spec(("replicas", None, None), self.parallel)
        return RowBuffers(tokens=flat, scores=deep, counts=flat, biases=deep, masks=flat)
