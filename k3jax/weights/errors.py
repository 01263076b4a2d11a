"""What can be wrong with a checkpoint, and the error that reports all of it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
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
    "misplaced_tensor",  # index and shards disagree about where it is
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


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      message: a whole sentence that names file, tensor, value and expectation.
      file: the file to blame, if there is one.
      tensor: stored name of the tensor to blame, if there is one.
    """

    kind: ProblemKind
    message: str
    file: Path | None = None
    tensor: str | None = None


class WeightError(ConfigError):
    """A checkpoint cannot be loaded. `found` has every problem, the message the first ones."""

    def __init__(self, found: Sequence[Problem]):
        self.found = tuple(found)
        lines = [problem.message for problem in self.found[:_SHOWN_PROBLEMS]]
        if len(self.found) > _SHOWN_PROBLEMS:
            lines.append(f"and {len(self.found) - _SHOWN_PROBLEMS} more problems")
        super().__init__(lines)


def refusal(
    kind: ProblemKind, message: str, file: Path | None = None, tensor: str | None = None
) -> WeightError:
    """The error of a single problem."""
    return WeightError([Problem(kind, message, file, tensor)])


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise `WeightError` if there is a problem."""
    if problems:
        raise WeightError(problems)
