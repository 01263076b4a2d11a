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
    """Pieces of a text as prompts of mixed lengths; half of them begin with one of three prefixes.

    One in four has an answer that soon needs another page of the embedded model, so that requests
    come into each other's way and some give their pages back.

    Args:
      text: token ids, some thousand.
    """
    prefixes = [_piece(rng, text, length) for length in (150, 400, 900)]
    found = []
    for number in range(count):
        grows = number % 4 == 0
        start = rng.choice(prefixes) if not grows and rng.random() < 2 / 3 else ()
        own = _piece(rng, text, 250 if grows else rng.choice((1, 5, 30, 120, 300)))
        found.append(
            Question(
                prompt=(*start, *own), max_tokens=64 if grows else rng.choice((1, 8, 24, 64)),
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
