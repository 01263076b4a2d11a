"""What crosses between host and device in one step, and what a step means to a client.

`StepPlan` goes down, `StepResult` comes up, one for each replica that has rows: together they are a
`GroupPlan` and a `GroupResult`. `Output` goes on to the request's stream. The values of single rows
are named tuples, because every step makes hundreds of them and a frozen dataclass takes three times
as long to make.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from k3jax.buckets import Bucket
from k3jax.controls import RowControls, RowMask
from k3jax.results import TokenLogprobs
from serving.request import RequestError, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class PageCopy(NamedTuple):
    """Make the first `num_tokens` entries of attention page `target` those of `source`, in every
    layer position, bit by bit. The rest of `target` is left as it is."""

    source: int
    target: int
    num_tokens: int


class StateExport(NamedTuple):
    """Store the recurrent state at a position strictly inside a row's chunk.

    Attributes:
      position: tokens of the request that the state summarizes; `start < position < start +
        length`.
      pages: where it goes, one a recurrent group.
    """

    position: int
    pages: tuple[int, ...]


class Admission(NamedTuple):
    """A request that a step admitted.

    Attributes:
      hit_tokens: reused tokens of the prefix; the request's first row starts there.
      junction: longest hit of one kind of layer alone, if that is longer; else 0
        (cache-semantics.md section 4).
    """

    request_id: str
    hit_tokens: int
    junction: int


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
        group, in the order of `CacheSpec.recurrent_groups`. Source pages that differ from the
        target are only read.
      samples: whether the row's last token yields a new one.
      export: a state inside the chunk to keep as well.
      scored: whether the log probabilities of what follows the row's tokens in its prompt are asked
        for. following: the token behind the row, if it is known when the row is prefilled.
      num_drafts: of the `length` tokens, how many are drafts that come last.
      draft_states: pages of the state after each draft; `state_target` then holds the state before
        the drafts.
      goes_on: whether the next step decodes from `following`, which is put into the device's token
        buffer in place of a sampled token. The row has not sampled then.
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
    export: StateExport | None = None
    num_drafts: int = 0
    draft_states: tuple[tuple[int, ...], ...] = ()
    scored: bool = False
    following: int = 0
    goes_on: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of a replica.

    Attributes:
      step_id: counts up by one; results come back in the same order.
      rows: at most `bucket.rows`.
      clear_pages: pages to set to zero, in every layer position, before anything else in the step.
        No page occurs twice.
      copies: executed after the clearing and before the forward pass. No page is the target of two
        copies, or both source and target.
      admitted: requests whose first row this is, in order.
      controls: of those that need some; to be set before the forward pass.
      masks: of the rows with a grammar that sample; likewise.
    """

    step_id: int
    bucket: Bucket
    rows: tuple[RowPlan, ...]
    clear_pages: tuple[int, ...]
    copies: tuple[PageCopy, ...] = ()
    admitted: tuple[Admission, ...] = ()
    controls: tuple[RowControls, ...] = ()
    masks: tuple[RowMask, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step sampled, one entry a row of its plan.

    Attributes:
      tokens: int32 `[S]`; means something only for rows that sample.
      finite: bool `[S]`; false where the logits that a sampling row drew from hold NaN or Inf.
      accepted: drafts that the target model took, for each row, in front of its sampled token;
        empty if no row has drafts.
      logprobs: of the tokens of each row, for rows that ask for them; empty if none does.
      prompt_logprobs: of what follows each token of the step, for rows that ask for that; likewise.
    """

    step_id: int
    tokens: Int32[np.ndarray, " S"]
    finite: Bool[np.ndarray, " S"]
    accepted: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One step of all replicas: they run the same program, since their experts exchange tokens.

    Attributes:
      step_id: of each replica's plan too.
      bucket: of each replica's plan too.
      plans: one entry a replica; None if it has no rows in this step.
    """

    step_id: int
    bucket: Bucket
    plans: tuple[StepPlan | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupResult:
    """What a step of all replicas sampled.

    Attributes:
      results: one entry a replica; None if it had no rows.
      expert_load: (token, expert) pairs that each rank's experts computed; empty if not counted.
    """

    step_id: int
    results: tuple[StepResult | None, ...]
    expert_load: tuple[int, ...] = ()


class Output(NamedTuple):
    """News of one request for its client.

    Attributes:
      token_ids: only the new ones. The token that ended the request with `stop` is included, as the
        last.
      prompt_tokens: of the whole prompt.
      completion_tokens: generated so far, `token_ids` included.
      cached_tokens: of the prompt, how many were reused when the request was first admitted.
      finish_reason: None while the request goes on. The last output of a request, and only that,
        has one.
      matched_token_id: the token that ended the request, when `finish_reason` is `stop`.
      matched_stop: the string that did.
      logprobs: of `token_ids`, if the request asks for them.
      prompt_logprobs: of the prompt's tokens from the second on; with the first output of a request
        that asks for them.
      error: set when `finish_reason` is `error`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    matched_token_id: int | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    matched_stop: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
