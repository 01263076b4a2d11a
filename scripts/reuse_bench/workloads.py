"""Scripted conversations: prompts that begin with what other requests had, as in real use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_NUM_TOKENS = 256  # the embedded model's ordinary tokens


class Turn(NamedTuple):
    """One request of a dialogue. Its prompt is a part of the dialogue so far, and new tokens.

    Attributes:
      kept: tokens of the dialogue so far, the last prompt and its answer; None for all.
      tokens: new ones.
      answer_tokens: length of the answer.
    """

    kept: int | None
    tokens: tuple[int, ...]
    answer_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Dialogues of equally many turns."""

    name: str
    dialogues: tuple[tuple[Turn, ...], ...]


def multi_turn(seed: int) -> Workload:
    """Three conversations of six turns: the whole history, and about 100 new tokens."""
    rng = np.random.default_rng(seed)
    return Workload(
        "multi-turn",
        tuple(
            tuple(
                Turn(None, _random(rng, int(rng.integers(80, 121))), int(rng.integers(50, 71)))
                for _ in range(6)
            )
            for _ in range(3)
        ),
    )


def shared_system(seed: int) -> Workload:
    """Twelve questions of 80 to 200 tokens after the same system prompt of 700 tokens."""
    rng = np.random.default_rng(seed)
    system = _random(rng, 700)
    return Workload(
        "system prompt",
        tuple((Turn(0, system + _random(rng, int(rng.integers(80, 201))), 16),) for _ in range(12)),
    )


def edited(seed: int) -> Workload:
    """Two prompts of 2,000 tokens, sent twice as they are and three times with another end."""
    rng = np.random.default_rng(seed)
    dialogues: list[tuple[Turn, ...]] = []
    for _ in range(2):
        head, end = _random(rng, 1800), _random(rng, 200)
        ends = [end, *(_random(rng, 200) for _ in range(3))]
        edits = [Turn(len(head), text, 16) for text in ends]
        dialogues.append((Turn(0, head + end, 16), *edits))
    return Workload("resend and edit", tuple(dialogues))


WORKLOADS: Mapping[str, Callable[[int], Workload]] = {
    "multi-turn": multi_turn,
    "system-prompt": shared_system,
    "edit": edited,
}


def new_tokens(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Prompt tokens that a perfect cache would compute: those that no earlier request computed in
    its prompt or its answer, and the last one of every prompt, whose logits are needed.

    Args:
      requests: prompts and answers, in the order in which they were sent.
    """
    # The last token of an answer is never computed.
    root: _Node = {}
    num_new = 0
    for prompt, answer in requests:
        node, num_known = root, 0
        for i, token in enumerate((*prompt, *answer[:-1])):
            num_known += token in node and i < len(prompt)
            node = node.setdefault(token, {})
        num_new += len(prompt) - min(num_known, len(prompt) - 1)
    return num_new


type _Node = dict[int, _Node]


def _random(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, _NUM_TOKENS, length).tolist())
