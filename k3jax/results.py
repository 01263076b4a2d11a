"""The result of a serving step as it comes up from the device. NumPy only.

One int32 array `[dp, 2 S + R]`, equal on all devices: for each replica the ids that its rows
sampled, whether their logits were finite, and the load of the experts of each rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32


class StepOutput(NamedTuple):
    """What a step gives the host.

    Attributes:
      tokens: sampled ids. finite: whether the logits that they were drawn from are. Both mean
        something only for rows that sample.
      expert_load: (token, expert) pairs that each rank's experts computed, in all layers together.
    """

    tokens: Int32[np.ndarray, "dp S"]
    finite: Bool[np.ndarray, "dp S"]
    expert_load: Int32[np.ndarray, " R"]


def unpack(array: Int32[np.ndarray, "dp n"], rows: int) -> StepOutput:
    """Take a result of `rows` rows a replica apart."""
    return StepOutput(
        tokens=array[:, :rows],
        finite=array[:, rows : 2 * rows] != 0,
        expert_load=array[:, 2 * rows :].sum(axis=0, dtype=np.int32),
    )
