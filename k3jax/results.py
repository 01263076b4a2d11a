"""The result of a serving step as it comes up from the device. NumPy only.

One int32 array `[dp, 2 S + R]`, equal on all devices: for each replica the ids that its rows
sampled, whether their logits were finite, and the load of the experts of each rank. A step with
room for `N` drafts a row has `S (1 + N)` more before the load: how many drafts each row took, and
all its drafts.
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
      accepted: drafts that each row took in front of its sampled id.
      expert_load: (token, expert) pairs that each rank's experts computed, in all layers together.
    """

    tokens: Int32[np.ndarray, "dp S"]
    finite: Bool[np.ndarray, "dp S"]
    accepted: tuple[tuple[tuple[int, ...], ...], ...]
    expert_load: Int32[np.ndarray, " R"]


def unpack(array: Int32[np.ndarray, "dp n"], rows: int, num_drafts: int = 0) -> StepOutput:
    """Take a result of `rows` rows a replica apart; `num_drafts` is that of the bucket."""
    end = 2 * rows + (rows * (1 + num_drafts) if num_drafts else 0)
    counts = array[:, 2 * rows : 3 * rows] if num_drafts else array[:, :0]
    drafts = array[:, 2 * rows + counts.shape[1] : end].reshape(len(array), -1, num_drafts or 1)
    return StepOutput(
        tokens=array[:, :rows],
        finite=array[:, rows : 2 * rows] != 0,
        accepted=tuple(
            tuple(tuple(row[:count]) for count, row in zip(of_rows, tokens, strict=True))
            for of_rows, tokens in zip(counts.tolist(), drafts.tolist(), strict=True)
        ),
        expert_load=array[:, end:].sum(axis=0, dtype=np.int32),
    )
