"""What a server's step programs are compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec
from jaxtyping import Array

from k3jax.cache_spec import layer_groups
from k3jax.config import Dtype, ModelConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What the step programs are compiled for. Hashable: everything here is static.

    Attributes:
      max_rows: entries of a replica's token buffer; one more is scratch, for rows not in use.
      draft: a draft model, which leaves `num_drafts` tokens behind the newest one in the buffer.
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
    def buffer_shape(self) -> tuple[int, int]:
        """Of the token buffers of all replicas: newest token and drafts of each row."""
        return (self.parallel.dp * (self.max_rows + 1), 1 + self.num_drafts)

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
    def buffer_spec(self) -> PartitionSpec:
        """Of the token buffer."""
        return partition_spec(("replicas", None), self.parallel)
