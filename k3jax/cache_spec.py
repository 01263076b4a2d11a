"""What the model caches: layer groups, bytes of a token and of a state.

Host values only; see cache-semantics.md sections 1 and 2. Layers of one group share a page table;
every group uses the same `num_positions` layer positions of the pool, so a page number means the
same bytes in each of them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.config import DTYPE_BYTES, Dtype, ModelConfig
from k3jax.draft.config import DraftConfig, positions_per_entry

GroupKind = Literal["attention", "recurrent"]
STATE_BYTES = 4  # KDA state is float32 (k3-model.md section 2.10)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a page table; `layers[i]` uses layer position `i` of the pool."""

    kind: GroupKind
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Sizes of one rank's cache, in bytes for one layer position.

    Attributes:
      groups: in the order of their first layers.
      token_bytes: MLA entry of one token.
      conv_bytes, recurrent_bytes: the two parts of one request's KDA state.
      draft_positions: layer positions of a draft model, behind those of the attention layers.
    """

    groups: tuple[LayerGroup, ...]
    token_bytes: int
    conv_bytes: int
    recurrent_bytes: int
    draft_positions: int = 0

    @property
    def state_bytes(self) -> int:
        return self.conv_bytes + self.recurrent_bytes

    @property
    def num_positions(self) -> int:
        """Layer positions of the pool."""
        return max(
            len(group.layers) + (self.draft_positions if group.kind == "attention" else 0)
            for group in self.groups
        )

    @property
    def recurrent_groups(self) -> tuple[LayerGroup, ...]:
        return tuple(group for group in self.groups if group.kind == "recurrent")


def cache_spec(
    cfg: ModelConfig,
    *,
    tp: int,
    dtype: Dtype,
    num_drafts: int = 0,
    draft: DraftConfig | None = None,
) -> CacheSpec:
    """Describe the cache of one rank.

    Args:
      tp: ranks that share the heads. KDA state is split over them, MLA entries are not.
      dtype: of MLA entries and of the convolution window.
      num_drafts: draft tokens whose convolution inputs are kept beside the window.
      draft: model whose context lies in the same pages.
    """
    size = DTYPE_BYTES[dtype]
    width = cfg.kda_width // tp
    positions = 0
    if draft is not None:
        per_layer = positions_per_entry(draft.entry_width(tp), cfg.mla_entry_width)
        positions = draft.num_layers * per_layer
    return CacheSpec(
        groups=layer_groups(cfg),
        token_bytes=cfg.mla_entry_width * size,
        conv_bytes=(cfg.conv_width - 1 + num_drafts) * 3 * width * size,
        recurrent_bytes=width * cfg.kda_head_dim * STATE_BYTES,
        draft_positions=positions,
    )


def layer_groups(cfg: ModelConfig) -> tuple[LayerGroup, ...]:
    """Cut the layers of each kind into groups of about equal size.

    The smaller kind sets the group size, unless the larger is less than 1.5 times as large. A
    larger kind is cut into `k = ceil(n / size)` groups that take every k-th of its layers.
    """
    kinds: list[tuple[GroupKind, tuple[int, ...]]] = [
        ("recurrent", cfg.kda_layers),
        ("attention", cfg.mla_layers),
    ]
    sizes = sorted(len(layers) for _, layers in kinds if layers)
    size = sizes[-1] if sizes[-1] < 1.5 * sizes[0] else sizes[0]
    groups = []
    for kind, layers in kinds:
        if not layers:
            continue
        # One page table serves all attention layers, so attention is never cut.
        count = -(-len(layers) // size) if kind == "recurrent" else 1
        groups += [LayerGroup(kind=kind, layers=layers[i::count]) for i in range(count)]
    return tuple(sorted(groups, key=lambda group: group.layers[0]))
