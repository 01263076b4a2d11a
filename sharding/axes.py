"""Names and sizes of the mesh axes, and the `--mesh` notation. Never imports jax.

`dp` holds replicas of attention, `tp` splits heads and columns. Experts are split over the
flattened `(dp, tp)` axes (`experts="ep"`), or inside each expert (`experts="tp"`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

DP = "dp"
TP = "tp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh.

    Attributes:
      dp: data-parallel replicas of attention.
      tp: ranks that share one replica's heads and columns.
      experts: `ep` gives each rank whole experts, `tp` a slice of every expert.
    """

    dp: int = 1
    tp: int = 1
    experts: Literal["ep", "tp"] = "ep"

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
