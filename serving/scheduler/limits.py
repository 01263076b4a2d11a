"""What the server can take, and the checks of a request that need nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from k3jax.buckets import Bucket, bucket_table
from k3jax.config import ConfigError, EngineConfig
from serving.page_table import PageGeometry, capacity
from serving.request import Request, RequestError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the scheduler. `make_limits` derives them from the configuration.

    With several replicas they are those of each, but `max_waiting` and `max_waiting_tokens` are
    those of the whole server.

    Attributes:
      max_rows: requests that run at once; also the entries of the device's token buffer in use.
      max_prefill_tokens, max_prefill_rows: of one prefill step.
      max_context_tokens: prompt plus output of one request.
      max_cached_tokens: tokens that one request can hold when it has the pool to itself.
      max_waiting, max_waiting_tokens: requests that wait for a row, and the tokens they bring.
      buckets: shapes of the compiled programs; every step fits one.
      vocab_size: token ids are below it.
      batching: `alternate`: a step has one kind of row, and the kinds take turns; `mixed`: both
        share a step of `max_prefill_tokens`.
      long_prefill_cap_tokens: of one request's chunk while there are others; 0 means no cap.
      reserve_full_prompt: admit a request only if all that it knows fits.
      reserve_running: and only beside what the running requests need next.
      watermark_pages: pages left free when a request is admitted beside others.
      by_priority: the smallest `Request.priority` first; else first come, first served.
      preempts_itself: a request that finds no page, and nobody to take it from, goes back to the
        queue; else it waits with the pages that it has.
      num_drafts: draft tokens of a decoding row and step, at most.
      draft_cost: time of a draft as a share of a step without; 0 always tries all.
      drafter: who proposes them: `device` has them in its buffer, `ngram` is `scheduler.ngram`.

    Raises:
      ConfigError: values that exclude each other, all at once.
    """

    max_rows: int
    max_prefill_tokens: int
    max_prefill_rows: int
    max_context_tokens: int
    max_cached_tokens: int
    max_waiting: int
    max_waiting_tokens: int
    buckets: tuple[Bucket, ...]
    vocab_size: int
    batching: Literal["alternate", "mixed"] = "alternate"
    long_prefill_cap_tokens: int = 0
    reserve_full_prompt: bool = True
    reserve_running: bool = True
    watermark_pages: int = 0
    by_priority: bool = False
    preempts_itself: bool = False
    num_drafts: int = 0
    draft_cost: float = 0.0
    drafter: Literal["device", "ngram"] = "device"

    def __post_init__(self) -> None:
        problems = _check_limits(self)
        if problems:
            raise ConfigError(problems)

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output of one request. The last generated token is never written to the
        cache."""
        return min(self.max_context_tokens, self.max_cached_tokens + 1)

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Tokens that can follow a prompt: the room left in the context and in the pool; 0 if there
        is none."""
        return max(0, self.max_request_tokens - prompt_tokens)


def make_limits(
    engine: EngineConfig,
    geometry: PageGeometry,
    *,
    num_pages: int,
    vocab_size: int,
    max_waiting: int = 1024,
    max_waiting_tokens: int | None = None,
    draft_cost: float = 0.0,
    drafter: Literal["device", "ngram"] = "ngram",
) -> Limits:
    """Limits of a server.

    Args:
      num_pages: pages of the pool, the null page included.
      max_waiting_tokens: default is the tokens of eight requests that fill the context.

    Raises:
      ConfigError: the configuration contradicts itself, or the pool is too small.
    """
    if max_waiting_tokens is None:
        max_waiting_tokens = 8 * engine.max_context_tokens
    return Limits(
        max_rows=engine.max_rows,
        max_prefill_tokens=engine.max_prefill_tokens,
        max_prefill_rows=engine.max_prefill_rows,
        max_context_tokens=engine.max_context_tokens,
        max_cached_tokens=capacity(geometry, num_pages).tokens,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        buckets=bucket_table(engine, page_tokens=geometry.page_tokens),
        vocab_size=vocab_size,
        num_drafts=engine.num_drafts,
        draft_cost=draft_cost,
        drafter=drafter,
    )


def check_request(request: Request, limits: Limits) -> None:
    """Refuse what could never be served, before any work starts.

    Raises:
      RequestError: INVALID_ARGUMENT: empty prompt (KF-V10), a token id outside the vocabulary
        (KF-V11), no room in the context for the prompt or for the output (KF-V09), or a request
        larger than the pool (KF-C16).
    """
    prompt_tokens = len(request.prompt)
    max_tokens = request.sampling.max_tokens
    if not prompt_tokens:
        raise _refused("prompt is empty: got 0 tokens; expected at least 1")
    _check_ids("prompt", request.prompt, limits.vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    biased = tuple(token for token, _ in request.sampling.logit_bias)
    _check_ids("logit_bias", biased, limits.vocab_size)
    if prompt_tokens >= limits.max_context_tokens:
        raise _refused(
            f"prompt is too long: got {prompt_tokens} tokens; expected at most "
            f"{limits.max_context_tokens - 1}, one less than the context of "
            f"{limits.max_context_tokens}"
        )
    total = prompt_tokens + max_tokens
    if total > limits.max_context_tokens:
        raise _refused(
            f"prompt and max_tokens exceed the context: got {prompt_tokens} + {max_tokens} = "
            f"{total}; expected at most {limits.max_context_tokens}; lower max_tokens to "
            f"{limits.max_new_tokens(prompt_tokens)} or less"
        )
    if total > limits.max_request_tokens:
        raise _refused(
            f"the request never fits the cache: got {prompt_tokens} prompt tokens + "
            f"{max_tokens} max_tokens = {total}; expected at most {limits.max_request_tokens}, "
            "which fill the page pool"
        )


def _check_limits(limits: Limits) -> list[str]:
    """Every problem of the limits."""
    at_least: Mapping[str, int] = {
        "max_rows": 1,
        "max_prefill_tokens": 1,
        "max_prefill_rows": 1,
        "max_context_tokens": 2,
        "max_cached_tokens": 1,
        "max_waiting": 1,
        # Otherwise a prompt that fits the context could be refused for ever.
        "max_waiting_tokens": limits.max_context_tokens,
        "vocab_size": 1,
        "long_prefill_cap_tokens": 0,
        "watermark_pages": 0,
        "num_drafts": 0,
    }
    problems = [
        f"{name} is out of range: got {getattr(limits, name)}; expected >= {least}"
        for name, least in at_least.items()
        if getattr(limits, name) < least
    ]
    needed = {
        "decode": (limits.max_rows, limits.max_rows),
        "prefill": (
            limits.max_prefill_tokens,
            limits.max_rows if limits.batching == "mixed" else limits.max_prefill_rows,
        ),
    }
    for kind, (tokens, rows) in needed.items():
        shapes = [(b.tokens, b.rows) for b in limits.buckets if b.kind == kind]
        if not any(shape[0] >= tokens and shape[1] >= rows for shape in shapes):
            problems.append(
                f"no {kind} bucket is large enough: got (tokens, rows) {shapes}; expected one with "
                f"at least {(tokens, rows)}"
            )
    return problems


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        position, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise _refused(
            f"{field}[{position}] is not in the vocabulary: got {wrong}; expected "
            f"0..{vocab_size - 1}"
        )


def _refused(message: str) -> RequestError:
    return RequestError("INVALID_ARGUMENT", message)
