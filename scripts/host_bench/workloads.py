"""Random workloads for the cache benchmarks, as traces without answers. A seed fixes a workload.

Sequences are segments of streams (`serving.replay.trace`); all sizes are tokens.
"""

from __future__ import annotations

import dataclasses
import random

from serving.replay import Trace, generate
from serving.replay.trace import (
    Add,
    Group,
    Op,
    SchedulerConfig,
    Segment,
    SpecConfig,
    Step,
    TraceConfig,
    TraceItem,
)

_SUFFIX_STREAM = 1000
_ANSWER_STREAM = 20000
_MANY_PAGES = 40  # of short ones


def k3_config(*, usable_pages: int, max_model_tokens: int = 200_000) -> TraceConfig:
    """The cache of Kimi K3 on eight ranks with an fp8 latent (cache-semantics.md section 1)."""
    return TraceConfig(
        usable_pages=usable_pages,
        page_tokens=1536,
        unit_tokens=128,
        groups=(Group(kind="full"), *[Group(kind="recurrent")] * 3),
        retention_tokens=0,
        caching=True,
        scheduler=SchedulerConfig(
            max_step_tokens=8192, max_running=256, max_model_tokens=max_model_tokens
        ),
        spec=SpecConfig(),
    )


def short_config(*, usable_pages: int) -> TraceConfig:
    """Pages of a few tokens and one recurrent group: many pages a request."""
    return dataclasses.replace(
        k3_config(usable_pages=usable_pages),
        page_tokens=64,
        unit_tokens=16,
        groups=(Group(kind="full"), Group(kind="recurrent")),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Conversations that share system prompts; each turn continues the one before.

    Attributes:
      burst: requests that arrive together.
    """

    conversations: int
    turns: int
    system_tokens: tuple[int, int]
    turn_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    burst: int = 8


def chat(name: str, config: TraceConfig, shape: Chat, seed: int) -> Trace:
    """A workload of conversations. Every turn has ended before the next ones arrive."""
    rng = random.Random(seed)
    systems = [Segment(stream, 0, rng.randint(*shape.system_tokens)) for stream in range(1, 5)]
    histories = [(rng.choice(systems),) for _ in range(shape.conversations)]
    ops: list[Op] = []
    number = 0
    for _ in range(shape.turns):
        order = rng.sample(range(shape.conversations), shape.conversations)
        for position, conversation in enumerate(order):
            number += 1
            question = Segment(_SUFFIX_STREAM + number, 0, rng.randint(*shape.turn_tokens))
            answer = Segment(_ANSWER_STREAM + number, 0, rng.randint(*shape.answer_tokens))
            prompt = (*histories[conversation], question)
            ops.append(
                Add(request_id=f"r{number}", prompt=prompt, max_new=answer.end, output=(answer,))
            )
            histories[conversation] = (*prompt, answer)
            if position % shape.burst == shape.burst - 1:
                ops += [Step()] * rng.randint(1, 4)
        ops += [Step()] * (2 * shape.conversations + 2 * shape.answer_tokens[1])
    return Trace(name=name, config=config, items=tuple(TraceItem(op) for op in ops))


def one_prompt(config: TraceConfig, num_tokens: int) -> Trace:
    """One long prompt, computed to its end."""
    add = Add(
        request_id="first",
        prompt=(Segment(1, 0, num_tokens),),
        max_new=1,
        output=(Segment(_ANSWER_STREAM, 0, 1),),
    )
    steps = num_tokens // (config.scheduler.max_step_tokens // 2) + 4
    items = (add, *[Step()] * steps)
    return Trace(name="one_prompt", config=config, items=tuple(TraceItem(op) for op in items))


def replay_workloads(count: int, seed: int) -> list[Trace]:
    """The first `count` workloads of the replay's generator in which both engines do the same.

    These have prefix reuse in a hybrid cache, first come first served, without drafts, steps in
    flight, or export of states, and with room for all.
    """
    found: list[Trace] = []
    while len(found) < count:
        trace = generate(seed)
        seed += 1
        config = trace.config
        if (
            config.caching
            and config.recurrent_groups
            and not config.groups[-1].can_export
            and config.usable_pages >= _MANY_PAGES
            and not config.spec.draft_tokens
            and config.scheduler.async_depth == 1
            and config.scheduler.policy == "fcfs"
        ):
            found.append(trace)
    return found
