"""What can be wrong with a checkpoint, and the error that reports all of it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from k3jax.config import ConfigError

ProblemKind = Literal[
    "no_weights",  # the folder holds no checkpoint
    "index",  # the index file cannot be used
    "missing_file",
    "unlisted_file",  # a shard that the index does not know
    "header",  # a safetensors header that breaks the format
    "truncated",
    "missing_tensor",
    "misplaced_tensor",  # the index names a file that does not hold it
    "duplicate_tensor",
    "unknown_tensor",
    "expert_format",  # dense and packed experts in one checkpoint
    "shape",
    "dtype",
    "padding",  # what is cut off is not zero
    "scale",  # an MXFP4 scale that no real weight has
    "converted",  # a converted checkpoint that does not fit the model
    "cache",  # the cache of converted weights cannot be used
]

_SHOWN_PROBLEMS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      message: a whole sentence that names file, tensor, value and expectation.
      file: name or path of the file, if one is to blame.
      tensor: stored name of the tensor, if one is to blame.
    """

    kind: ProblemKind
    message: str
    file: str | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        return self.message


class WeightError(ConfigError):
    """A checkpoint cannot be loaded. `found` carries every problem, the message the first ones."""

    def __init__(self, problems: Problem | Sequence[Problem]):
        self.found = (problems,) if isinstance(problems, Problem) else tuple(problems)
        lines = [str(problem) for problem in self.found[:_SHOWN_PROBLEMS]]
        if len(self.found) > _SHOWN_PROBLEMS:
            lines.append(f"and {len(self.found) - _SHOWN_PROBLEMS} more problems")
        super().__init__(lines)


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise `WeightError` if there is a problem."""
    if problems:
        raise WeightError(problems)
