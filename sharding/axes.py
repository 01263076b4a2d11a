"""Names and sizes of the mesh axes, and the `--mesh` notation. Never imports jax.

`dp` holds replicas of attention, `tp` splits heads and columns. Experts are split over the
flattened `(dp, tp)` axes, whole (`experts="ep"`) or inside each (`experts="tp"`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

DP = "dp"
TP = "tp"

Experts = Literal["ep", "tp"]
Dispatch = Literal["all_gather", "all_to_all", "ragged"]
CollectiveTail = Literal["all_reduce", "columns", "folded"]
TailForm = Literal[CollectiveTail, "fused"]
Tail = Literal["auto", TailForm]
ShardTokens = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh, and how work is shared over it.

    Attributes:
      dp: data-parallel replicas of attention.
      tp: ranks that share one replica's heads and columns.
      experts: `ep` gives each rank whole experts, `tp` a slice of every expert.
      dispatch: how tokens reach experts of other ranks; see `sharding.dispatch`.
      tail: how the partial results behind the experts become one; see `collectives.moe_tail`, and
        `pallas_kernels.moe_tail` for `fused`. `auto` chooses one of the former by the number of
        tokens.
      shard_tokens: whether residuals, norms, router and latent projections of a prefill step are
        split by tokens over `tp`; `auto` does so where the tokens divide.
    """

    dp: int = 1
    tp: int = 1
    experts: Experts = "ep"
    dispatch: Dispatch = "all_gather"
    tail: Tail = "auto"
    shard_tokens: ShardTokens = "auto"

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `tp8`, `dp2xtp4` or `dp8` into `{"dp": ..., "tp": ...}`.

    Raises:
      ValueError: the text is not in that notation; the message says what was expected.
    """
    sizes = {DP: 1, TP: 1}
    seen: set[str] = set()
    for part in text.split("x"):
        match = re.fullmatch(r"(dp|tp)([1-9][0-9]*)", part)
        if match is None or match[1] in seen:
            raise ValueError(
                f"mesh is not understood: got {text!r}; expected axis sizes such as 'tp8' or "
                "'dp2xtp4'"
            )
        seen.add(match[1])
        sizes[match[1]] = int(match[2])
    return sizes
