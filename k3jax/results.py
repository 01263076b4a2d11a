"""What comes up from the device after a serving step. NumPy only.

`StepArrays` are equal on all devices:

* `result`, int32 `[dp, 2 S + R]`: for each replica the ids that its rows sampled, whether their
  logits were finite, and the load of the experts of each rank. A step with room for `N` drafts a
  row has `S (1 + N)` more before the load: how many drafts each row took, and all its drafts.
* `logprobs`, int32 `[dp, S, X, 1 + 2 K]`, `X = 1 + N`: for each token that a row generated, the
  bits of its log probability, then of the `K` largest, then their ids. Zeros, unless a row asks.
* `prompt_logprobs`, int32 `[dp, T, 1 + 2 K]` of prefill steps: the same for what follows each token
  of a prompt. Zeros, unless a row asks. Other steps have `T = 0`.

Log probabilities are those of the model itself, before temperature, filters, penalties and biases:
so they are finite, also of tokens that could not be drawn (KF-V16).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

MAX_LOGPROBS = 20  # K, or the vocabulary if that is smaller


class StepArrays(NamedTuple):
    """Arrays of a step, or something of each; see the module."""

    result: Any
    logprobs: Any
    prompt_logprobs: Any

    def block_until_ready(self) -> StepArrays:
        """Wait until the devices have computed them."""
        for array in self:
            array.block_until_ready()
        return self


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


class TokenLogprobs(NamedTuple):
    """Log probabilities at one place.

    Attributes:
      chosen: of the token that stands there.
      top: the largest ones, descending. top_ids: their tokens.
    """

    chosen: float
    top: tuple[float, ...]
    top_ids: tuple[int, ...]


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


def unpack_logprobs(
    array: Int32[np.ndarray, "places n"], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Take log probabilities of some places apart, with the `num_top` largest of each."""
    width = array.shape[1] // 2
    numbers = array[:, : 1 + min(num_top, width)].view(np.float32).tolist()
    ids = array[:, 1 + width : 1 + width + num_top].tolist()
    return tuple(
        TokenLogprobs(number[0], tuple(number[1:]), tuple(row))
        for number, row in zip(numbers, ids, strict=True)
    )
