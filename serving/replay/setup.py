"""A scheduler as a trace's configuration asks for it, with one wide bucket of each kind."""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.buckets import Bucket
from serving import scheduler
from serving.page_table import CachePolicy, PageGeometry, capacity, empty_table
from serving.replay.trace import VOCAB_SIZE, Add, TraceConfig, token_ids
from serving.request import Request, SamplingParams
from serving.scheduler import Limits, SchedulerState

_MANY = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the trace format does not name. The defaults are those of the recorded engine; the
    meanings are those of `Limits` and `CachePolicy`."""

    batching: Literal["alternate", "mixed"] = "mixed"
    reserve_running: bool = False
    preempts_itself: bool = True
    keep_answer_end: bool = False
    key_every_unit: bool = False


RECORDED = Choices()
SERVED = Choices(
    batching="alternate",
    reserve_running=True,
    preempts_itself=False,
    keep_answer_end=True,
    key_every_unit=True,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a replay starts from. `state` has no requests and no entries."""

    config: TraceConfig
    policy: CachePolicy
    limits: Limits
    state: SchedulerState


def set_up(config: TraceConfig, choices: Choices = RECORDED) -> Setup:
    """Build the page table and the scheduler.

    Raises:
      ConfigError: the configuration is one that this scheduler refuses.
    """
    geometry = _geometry(config)
    num_pages = config.usable_pages + 1
    policy = _policy(config, choices)
    limits = _limits(config, choices, geometry, num_pages)
    table = empty_table(geometry, num_pages, policy)
    return Setup(
        config=config,
        policy=policy,
        limits=limits,
        state=scheduler.initial_state(table, limits),
    )


def make_request(op: Add) -> Request:
    """The request that an operation adds. It ends by its number of tokens alone."""
    return Request(
        request_id=op.request_id,
        prompt=token_ids(op.prompt),
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=op.max_new, ignore_eos=True),
        eos_token_ids=(),
        cache_salt=op.salt,
        priority=op.priority,
    )


def _geometry(config: TraceConfig) -> PageGeometry:
    """Pages of the right number of tokens; their bytes do not matter to the host."""
    num_state_pages = len(config.recurrent_groups)
    return PageGeometry(
        page_tokens=config.page_tokens,
        unit_tokens=config.page_tokens,
        token_bytes=2,
        state_bytes=2 * config.page_tokens if num_state_pages else 0,
        num_positions=1,
        num_state_pages=num_state_pages,
        num_state_layers=num_state_pages,
    )


def _policy(config: TraceConfig, choices: Choices) -> CachePolicy:
    recurrent = [group for group in config.groups if group.kind == "recurrent"]
    first = recurrent[0] if recurrent else None
    spec = config.spec
    is_keyed = choices.key_every_unit and config.unit_tokens < config.page_tokens
    return CachePolicy(
        enabled=config.caching,
        unit_tokens=config.unit_tokens,
        retention_tokens=config.retention_tokens,
        tail_drop=spec.tail_drop,
        hash_lookahead_tokens=spec.hash_lookahead_tokens,
        checkpoint_junctions=spec.shared_prefix_checkpoint or is_keyed,
        num_state_slots=first.spec_slots if first else 0,
        export_tokens=first.export_align_tokens if first and first.can_export else None,
        lookahead_slots=spec.lookahead_slots,
        keep_answer_end=choices.keep_answer_end,
        key_every_unit=is_keyed,
    )


def _limits(
    config: TraceConfig, choices: Choices, geometry: PageGeometry, num_pages: int
) -> Limits:
    fill = config.scheduler
    # The pages of a row also cover what is reserved past its tokens.
    pages = num_pages + config.spec.lookahead_slots
    tokens = max(fill.max_step_tokens, fill.max_running * (1 + config.spec.draft_tokens))
    return Limits(
        max_rows=fill.max_running,
        max_prefill_tokens=fill.max_step_tokens,
        max_prefill_rows=fill.max_running,
        max_context_tokens=fill.max_model_tokens,
        max_cached_tokens=capacity(geometry, num_pages).tokens,
        max_waiting=_MANY,
        max_waiting_tokens=_MANY,
        buckets=(
            Bucket("decode", tokens, fill.max_running, pages),
            Bucket("prefill", tokens, fill.max_running, pages),
        ),
        vocab_size=VOCAB_SIZE,
        batching=choices.batching,
        long_prefill_cap_tokens=fill.long_prefill_cap_tokens,
        reserve_full_prompt=fill.reserve_full_prompt,
        reserve_running=choices.reserve_running,
        preempts_itself=choices.preempts_itself,
        watermark_pages=int(fill.watermark * num_pages),
        by_priority=fill.policy == "priority",
        num_drafts=config.spec.draft_tokens,
    )
