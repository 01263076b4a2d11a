"""The load of the server as a gateway reads it: of each replica, which is a `dp` rank."""

from __future__ import annotations

import datetime
import importlib.metadata
from typing import Any

from serving.counts import Counts, ReplicaCounts
from serving.rpc.lifecycle import Served
from serving.rpc.protocol import common, messages

_WINDOW_S = 1.0


class RateMeter:
    """Tokens per second between readings. A reading too soon after another repeats its rate.

    Args:
      now_s: time at which the count is 0.
    """

    def __init__(self, now_s: float):
        self._count, self._time_s, self._rate = 0, now_s, 0.0

    def read(self, count: int, now_s: float) -> float:
        """Return the rate at which `count` has grown."""
        if now_s - self._time_s >= _WINDOW_S:
            self._rate = (count - self._count) / (now_s - self._time_s)
            self._count, self._time_s = count, now_s
        return self._rate


def load_message(
    served: Served, counts: ReplicaCounts, *, dp_rank: int, tokens_per_s: float
) -> messages.SchedulerLoad:
    """The load of one replica. A page counts as used while a request holds it; what is only kept
    for reuse counts as free."""
    used_pages = counts.total_pages - counts.free_pages
    return messages.SchedulerLoad(
        dp_rank=dp_rank,
        num_running_reqs=counts.running,
        num_waiting_reqs=counts.waiting,
        num_total_reqs=counts.running + counts.waiting,
        num_used_tokens=used_pages * served.page_tokens,
        max_total_num_tokens=counts.total_pages * served.page_tokens,
        token_usage=used_pages / counts.total_pages,
        gen_throughput=tokens_per_s,
        # Share of the prompts' tokens that was reused, since the start.
        cache_hit_rate=counts.cache.hit_tokens / max(1, counts.cache.looked_up_tokens),
        utilization=counts.running / served.limits.max_rows,
        max_running_requests=served.limits.max_rows,
        num_waiting_uncached_tokens=counts.pending_prompt_tokens,
    )


def engine_load(
    served: Served,
    counts: ReplicaCounts,
    *,
    tokens_per_s: float,
    silence_s: float,
    is_whole: bool,
) -> common.EngineLoad:
    """The load of one replica as it is pushed with the events of its cache: the numbers of
    `load_message`.

    Args:
      silence_s: age of the oldest step in flight.
      is_whole: also what no router decides by.
    """
    load = load_message(served, counts, dp_rank=0, tokens_per_s=tokens_per_s)
    message = common.EngineLoad(
        running_requests=load.num_running_reqs,
        waiting_requests=load.num_waiting_reqs,
        waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        token_usage=load.token_usage,
        active_token_usage=load.token_usage,  # what is kept for reuse only counts as free
        gen_throughput=load.gen_throughput,
        max_running_requests=load.max_running_requests,
        engine_silence_ms=round(1000 * silence_s) if counts.running else None,
        engine_reports_steps=True,
        prefill_pending_tokens=counts.pending_prompt_tokens,
    )
    if is_whole:
        message.cache_hit_rate = load.cache_hit_rate
        message.num_used_tokens = load.num_used_tokens
        message.max_total_num_tokens = load.max_total_num_tokens
    return message


def totals(counts: Counts) -> dict[str, Any]:
    """All that was counted since the start, by name."""
    return {
        "steps": counts.steps,
        "prompt_tokens": counts.prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "preemptions": counts.preemptions,
        "evictions": counts.evictions,
        **counts.cache._asdict(),
        "expert_load": ",".join(map(str, counts.expert_load)),
    }


def loads_message(
    loads: list[messages.SchedulerLoad], *, num_replicas: int
) -> messages.GetLoadsResponse:
    """The reply of `GetLoads`."""
    return messages.GetLoadsResponse(
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
        version=importlib.metadata.version("k3jax"),
        dp_rank_count=num_replicas,
        loads=loads,
    )
