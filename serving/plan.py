"""What crosses between host and device in one step, and what a step means to a client.

`StepPlan` goes down, `StepResult` comes up; `Output` goes on to the request's stream. The values
of single rows are named tuples, because every step makes hundreds of them and a frozen dataclass
takes three times as long to make.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from k3jax.buckets import Bucket
from serving.request import RequestError, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RowPlan(NamedTuple):
    """One request's part of a step.

    Attributes:
      slot: the row's entry in the device's token buffer. Stays the same while the request runs.
      start: tokens of the row that the cache already holds; position of the first token of this
        step.
      length: tokens of this step, >= 1.
      tokens: the `length` token ids, or None when `length` is 1 and the token is the last one that
        this row sampled: it is read from the device's token buffer.
      attention_pages: page of each `page_tokens` positions from 0; covers at least `start + length`
        tokens.
      state_source, state_target: pages of the KDA state before and after the step, one a recurrent
        group, in the order of `CacheSpec.recurrent_groups`.
      samples: whether the row's last token yields a new one.
    """

    request_id: str
    slot: int
    start: int
    length: int
    tokens: tuple[int, ...] | None
    attention_pages: tuple[int, ...]
    state_source: tuple[int, ...]
    state_target: tuple[int, ...]
    samples: bool
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of the device.

    Attributes:
      step_id: counts up by one; results come back in the same order.
      rows: at most `bucket.rows`.
      clear_pages: pages to set to zero, in every layer position, before anything else in the step.
        No page occurs twice.
    """

    step_id: int
    bucket: Bucket
    rows: tuple[RowPlan, ...]
    clear_pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step sampled, one entry a row of its plan.

    Attributes:
      tokens: int32 `[S]`; means something only for rows that sample.
      finite: bool `[S]`; false where the logits that a sampling row drew from hold NaN or Inf.
    """

    step_id: int
    tokens: Int32[np.ndarray, " S"]
    finite: Bool[np.ndarray, " S"]


class Output(NamedTuple):
    """News of one request for its client.

    Attributes:
      token_ids: only the new ones. The token that ended the request with `stop` is included, as the
        last.
      prompt_tokens: of the whole prompt.
      completion_tokens: generated so far, `token_ids` included.
      finish_reason: None while the request goes on. The last output of a request, and only that,
        has one.
      matched_token_id: the token that ended the request, when `finish_reason` is `stop`.
      error: set when `finish_reason` is `error`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    matched_token_id: int | None = None
    error: RequestError | None = None
