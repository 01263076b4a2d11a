"""A generation request, its sampling parameters, and the errors that end one request or the whole
engine.

Values only; built at the RPC edge. Token ids and positions are plain ints.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Status = Literal[
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "NOT_FOUND",
    "DEADLINE_EXCEEDED",
    "OUT_OF_RANGE",
    "DATA_LOSS",
    "INTERNAL",
]

MAX_UINT32 = 2**32 - 1
MAX_INT32 = 2**31 - 1


class RequestError(Exception):
    """One request cannot be served; all others are unaffected.

    Attributes:
      status: name of the gRPC status.
      message: names the field, its value and what was expected. Never holds prompt or generated
        text.
    """

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status: Status = status
        self.message = message


class InvariantError(Exception):
    """A bug: the host state contradicts itself. Stops the engine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
      temperature: 0 is greedy.
      top_k: candidates kept; 0, a negative number, or the vocabulary size and more mean all
        (KF-V17).
      top_p: probability mass kept, in (0, 1]; 1 means all.
      seed: uint32 of the request's random stream. Always concrete: the RPC edge draws one for a
        client that gave none, so that planning stays deterministic.
      max_tokens: generated tokens at most.
      stop_token_ids: each ends the request, in addition to the model's own end ids.
      ignore_eos: the model's end ids do not end the request; `stop_token_ids` still do.

    Raises:
      RequestError: INVALID_ARGUMENT, a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Written so that NaN, which fails every comparison, is refused.
        if not 0.0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a finite number >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "0 < top_p <= 1")
        if not -MAX_INT32 <= self.top_k <= MAX_INT32:
            raise _out_of_range("top_k", self.top_k, "a 32-bit integer; 0 means no limit")
        if not 0 <= self.seed <= MAX_UINT32:
            raise _out_of_range("seed", self.seed, f"0..{MAX_UINT32}")
        if self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, ">= 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
      request_id: unique among live requests.
      prompt: token ids.
      eos_token_ids: the model's end ids; `sampling.ignore_eos` suppresses them.
      cache_salt: requests reuse each other's prefixes only if their salts are equal.
      priority: smaller is more important; ignored unless the scheduler goes by priority.
      replica: number of the attention replica that has to serve it; None lets the server choose.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    cache_salt: str = ""
    priority: int = 0
    replica: int | None = None

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError(
                "INVALID_ARGUMENT", "request_id is empty: got ''; expected a unique, non-empty id"
            )

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that the request ever writes to the cache: the last generated one is not read."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def ends_with(self, token: int) -> bool:
        """Whether `token`, just generated, ends the request with reason `stop`."""
        sampling = self.sampling
        return token in sampling.stop_token_ids or (
            token in self.eos_token_ids and not sampling.ignore_eos
        )


def _out_of_range(field: str, value: object, expected: str) -> RequestError:
    return RequestError(
        "INVALID_ARGUMENT", f"{field} is out of range: got {value}; expected {expected}"
    )
