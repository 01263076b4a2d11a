"""What the clients of a soak ask, and what a request of each kind has to give."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from serving.rpc.protocol import messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A request that has one answer, whatever runs beside it.

    Attributes:
      temperature: with `seed`; 0 is greedy.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def message(self, request_id: str) -> messages.GenerateRequest:
        """The request."""
        return messages.GenerateRequest(
            request_id=request_id,
            tokenized=messages.TokenizedInput(input_ids=self.prompt),
            sampling_params=messages.SamplingParams(
                temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens,
                ignore_eos=True,
            ),
            stream=True,
        )  # fmt: skip


def questions(rng: random.Random, text: Sequence[int], count: int) -> list[Question]:
    """Pieces of a text as prompts of mixed lengths; two in five begin with one of three prefixes.

    Answers to those of 245 tokens soon need a second page of the embedded model: what makes
    requests give pages back.

    Args:
      text: token ids, some thousand.
    """
    prefixes = [_piece(rng, text, length) for length in (150, 400, 900)]
    found = []
    for number in range(count):
        start = rng.choice(prefixes) if rng.random() < 2 / 5 else ()
        own = _piece(rng, text, rng.choice((1, 5, 30, 120, 245, 300)))
        found.append(
            Question(
                prompt=(*start, *own), max_tokens=rng.choice((1, 8, 24, 64)),
                temperature=rng.choice((0.0, 0.0, 1.0)), seed=number,
            )
        )  # fmt: skip
    return found


def bad_request(rng: random.Random, question: Question, request_id: str) -> Any:
    """A request that must end with INVALID_ARGUMENT."""
    message = question.message(request_id)
    fault = rng.randrange(4)
    if fault == 0:
        message.tokenized.input_ids.append(2**31)
    elif fault == 1:
        message.sampling_params.temperature = float("nan")
    elif fault == 2:
        message.sampling_params.top_p = -1.0
    else:
        message.ClearField("tokenized")
    return message


def _piece(rng: random.Random, text: Sequence[int], length: int) -> tuple[int, ...]:
    start = rng.randrange(len(text) - length)
    return tuple(text[start : start + length])
