"""A generation request, its sampling parameters, and the errors that end one request or the whole
engine.

Values only; built at the RPC edge. Token ids and positions are plain ints.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from k3jax.controls import MAX_BIASES, Bias
from k3jax.results import MAX_LOGPROBS

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

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_UINT32 = 2**32 - 1
MAX_INT32 = 2**31 - 1
MAX_STOPS, MAX_STOP_CHARS = 32, 512


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


class Grammar(NamedTuple):
    """What an answer has to be.

    Attributes:
      kind: name of the field that asks for it.
      text: the JSON schema, expression or grammar; the choices as a JSON list.
    """

    kind: GrammarKind
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what is told of them.

    Attributes:
      temperature: 0 is greedy.
      top_k: candidates kept; 0, a negative number, or the vocabulary size and more mean all
        (KF-V17).
      top_p: probability mass kept, in (0, 1]; 1 means all.
      min_p: candidates kept are at least so likely as a share of the most likely one; 0 means all.
      presence_penalty, frequency_penalty: taken from the logit of a token that was generated, once
        and for each time; 0 is none.
      repetition_penalty: divides the logit of a token of the prompt or the output if it is
        positive, and multiplies it otherwise; 1 is none.
      logit_bias: pairs of a token id and what is added to its logit.
      seed: uint32 of the request's random stream. Always concrete: the RPC edge draws one for a
        client that gave none, so that planning stays deterministic.
      max_tokens: generated tokens at most.
      min_tokens: generated tokens before anything but `max_tokens` ends the request.
      stop_token_ids: each ends the request, in addition to the model's own end ids.
      stop: each of these strings ends the request once it is in the generated text.
      skip_special_tokens: control tokens are no part of that text.
      ignore_eos: the model's end ids do not end the request; `stop_token_ids` still do.
      logprobs: how many of the largest log probabilities are told with that of each new token;
        None tells none.
      prompt_logprobs: the same for the tokens of the prompt.
      grammar: what the answer has to be; its tokens are masked, so it has no drafts and is not
        planned ahead.
      grammar_from_first_token: the grammar is also that of a thought before the answer.
      is_plain: whether the device needs no more than temperature, top-k, top-p and seed.

    Raises:
      RequestError: INVALID_ARGUMENT, a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    grammar_from_first_token: bool = False
    # Of every row in every step: worth to be known beforehand.
    is_plain: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Written so that NaN, which fails every comparison, is refused.
        if not 0.0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a finite number >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "0 < top_p <= 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise _out_of_range("min_p", self.min_p, "0 <= min_p <= 1")
        if not -MAX_INT32 <= self.top_k <= MAX_INT32:
            raise _out_of_range("top_k", self.top_k, "a 32-bit integer; 0 means no limit")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise _out_of_range(name, getattr(self, name), "-2 to 2")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "a number > 0")
        if not 0 <= self.seed <= MAX_UINT32:
            raise _out_of_range("seed", self.seed, f"0..{MAX_UINT32}")
        if self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, ">= 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise _out_of_range("min_tokens", self.min_tokens, f"0..max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_LOGPROBS:
                raise _out_of_range(name, getattr(self, name), f"0..{MAX_LOGPROBS}")
        _check_biases(self.logit_bias)
        _check_stops(self.stop)
        is_plain = not self.min_p and self.logprobs is None and self.prompt_logprobs is None
        is_plain = is_plain and not self.has_penalties and not self.has_biases
        if self.grammar is not None:
            is_plain = False
            for name in ("ignore_eos", "min_tokens"):
                if getattr(self, name):
                    raise RequestError(
                        "INVALID_ARGUMENT",
                        f"{name} cannot be set beside {self.grammar.kind}: got "
                        f"{getattr(self, name)}; expected none, since the grammar says where the "
                        "answer ends",
                    )
        object.__setattr__(self, "is_plain", is_plain)

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens were there before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def has_biases(self) -> bool:
        """Whether logits of single tokens are changed, or banned for a while."""
        return bool(self.logit_bias) or self.min_tokens > 0


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
        if self.sampling.has_biases:
            count = len(self.biases)
            if count > MAX_BIASES:
                raise RequestError(
                    "INVALID_ARGUMENT",
                    f"logit_bias is too long: got {count} entries, ids that end the request among "
                    f"them if min_tokens is set; expected at most {MAX_BIASES}",
                )

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that the request ever writes to the cache: the last generated one is not read."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def biases(self) -> tuple[Bias, ...]:
        """What is added to logits: `logit_bias`, and nothing that ends the request may come before
        `min_tokens` have."""
        sampling = self.sampling
        biases = tuple(Bias(token, value) for token, value in sampling.logit_bias)
        if not sampling.min_tokens:
            return biases
        until = len(self.prompt) + sampling.min_tokens
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        return (*biases, *(Bias(token, -math.inf, until) for token in sorted(ends)))

    def ends_with(self, token: int) -> bool:
        """Whether `token`, just generated, ends the request with reason `stop`."""
        sampling = self.sampling
        return token in sampling.stop_token_ids or (
            token in self.eos_token_ids and not sampling.ignore_eos
        )


def _check_biases(biases: tuple[tuple[int, float], ...]) -> None:
    for token, value in biases:
        if not -100.0 <= value <= 100.0:
            raise _out_of_range(f"logit_bias[{token}]", value, "-100 to 100")


def _check_stops(stops: tuple[str, ...]) -> None:
    lengths = [len(stop) for stop in stops]
    if len(stops) > MAX_STOPS:
        raise _out_of_range("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    if lengths and not (min(lengths) >= 1 and max(lengths) <= MAX_STOP_CHARS):
        raise _out_of_range(
            "stop", f"strings of {lengths} characters", f"1..{MAX_STOP_CHARS} characters each"
        )


def _out_of_range(field: str, value: object, expected: str) -> RequestError:
    return RequestError(
        "INVALID_ARGUMENT", f"{field} is out of range: got {value}; expected {expected}"
    )
