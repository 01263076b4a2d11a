"""Random workloads as traces without answers, for the content model.

A seed is one configuration and one script of operations. Lengths lie on the edges where a cache
goes wrong: whole pages, whole units, and one token more or less. Requests share prefixes, continue
earlier ones, and repeat them. Every request fits the pool when it has it to itself.
"""

from __future__ import annotations

import dataclasses
import random

from serving.replay.trace import (
    Abort,
    Add,
    Complete,
    Group,
    Op,
    Policy,
    Probe,
    Reset,
    Schedule,
    SchedulerConfig,
    Segment,
    SpecConfig,
    Step,
    Trace,
    TraceConfig,
    TraceItem,
    num_tokens,
)

_OUTPUT_STREAM = 9000  # and up; prompts take streams below it
_SUFFIX_STREAM = 100  # and up: tokens of one prompt alone
_NUM_SHARED_STREAMS = 3
_SALTS = (*[""] * 9, "salt")


def generate(seed: int) -> Trace:
    """The workload of a seed."""
    rng = random.Random(seed)
    config = _config(rng)
    script = _Script(rng, config)
    items = tuple(TraceItem(op) for op in script.write())
    return Trace(name=f"random_{seed}", config=config, items=items)


def max_request_tokens(config: TraceConfig) -> int:
    """Prompt and output of the longest request of a workload.

    Without drafts it is all that the scheduler accepts: attention entries and one state fill the
    pool, and the last token is not cached. With drafts a request must have all that it may ever
    want at once: states in two columns, those after drafts, one that must stay as it is, an export.
    """
    num_groups, page = len(config.recurrent_groups), config.page_tokens
    spec = config.spec
    if not (spec.draft_tokens or spec.lookahead_slots):
        return (config.usable_pages - num_groups) * page + 1
    bundles = 0
    if num_groups:
        first = config.groups[config.recurrent_groups[0]]
        bundles = 3 + first.spec_slots + first.can_export
    pages = config.usable_pages - bundles * num_groups - 1  # one to copy into
    return pages * page - spec.lookahead_slots - spec.draft_tokens


def _config(rng: random.Random) -> TraceConfig:
    page = rng.choice((4, 8, 12, 16))
    num_groups = rng.choice((0, 1, 1, 1, 2, 3))
    units = [unit for unit in range(1, page + 1) if page % unit == 0]
    unit = rng.choice(units) if num_groups else page
    spec = _spec(rng)
    slots = rng.choice((0, spec.draft_tokens, spec.draft_tokens, spec.draft_tokens + 1))
    can_export = rng.random() < 0.4
    recurrent = Group(
        kind="recurrent",
        spec_slots=slots if spec.draft_tokens else 0,
        can_export=can_export,
        export_align_tokens=rng.choice((1, unit, 2 * unit)) if can_export else 1,
    )
    config = TraceConfig(
        usable_pages=1,
        page_tokens=page,
        unit_tokens=unit,
        groups=(Group(kind="full"), *[recurrent] * num_groups),
        retention_tokens=rng.choice((None, 0, 0, page * rng.randint(1, 3))),
        caching=rng.random() < 0.9,
        scheduler=_scheduler(rng, page),
        spec=spec,
    )
    # Some pools have room for all, some only for one long request and little else.
    least = 1 - max_request_tokens(config) // page  # pages for nothing but states and copies
    room = rng.choice((rng.randint(3, 8), rng.randint(6, 12), 40, 100))
    return dataclasses.replace(config, usable_pages=least + room)


def _spec(rng: random.Random) -> SpecConfig:
    drafts = rng.choice((0, 0, 0, 1, 2, 3))
    tail_drop = rng.random() < (0.5 if drafts else 0.15)
    return SpecConfig(
        draft_tokens=drafts,
        lookahead_slots=rng.choice((0, drafts)),
        tail_drop=tail_drop,
        shared_prefix_checkpoint=tail_drop and rng.random() < 0.5,
        hash_lookahead_tokens=0 if tail_drop else rng.choice((0, 0, 0, 1)),
    )


def _scheduler(rng: random.Random, page: int) -> SchedulerConfig:
    budget = rng.choice(
        (rng.randint(4, page), page, page + rng.randint(1, page), 3 * page + 1, 64, 8192)
    )
    policies: tuple[Policy, ...] = ("fcfs", "fcfs", "priority")
    return SchedulerConfig(
        max_step_tokens=budget,
        max_running=rng.choice((1, 2, 3, 8)),
        long_prefill_cap_tokens=rng.choice((0, 0, 0, rng.randint(1, 2 * page))),
        reserve_full_prompt=rng.random() < 0.7,
        watermark=rng.choice((0.0, 0.0, 0.01, 0.1)),
        policy=rng.choice(policies),
        async_depth=rng.choice((1, 1, 2)),
    )


class _Script:
    """Writes the operations of one workload."""

    def __init__(self, rng: random.Random, config: TraceConfig):
        self._rng = rng
        self._config = config
        self._max_tokens = max_request_tokens(config)
        self._added: list[Add] = []
        self._num_open = 0
        self._ops: list[Op] = []

    def write(self) -> tuple[Op, ...]:
        rng = self._rng
        for _ in range(rng.randint(2, 12)):
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                self._add()
            for _ in range(rng.choice((0, 1, 1, 2, 4, 8, 20))):
                self._step()
            if rng.random() < 0.12:
                self._ops.append(Abort(rng.choice(self._added).request_id))
            if rng.random() < 0.2:
                self._ops.append(Probe(self._prompt(), rng.choice(_SALTS)))
            if rng.random() < 0.05:
                self._reset()
        return tuple(self._ops)

    def _step(self) -> None:
        depth = self._config.scheduler.async_depth
        if depth == 1:
            self._ops.append(Step(self._accept()))
        elif self._num_open < depth and (not self._num_open or self._rng.random() < 0.5):
            self._ops.append(Schedule())
            self._num_open += 1
        else:
            self._complete()

    def _complete(self) -> None:
        self._ops.append(Complete(self._accept()))
        self._num_open -= 1

    def _accept(self) -> dict[str, int]:
        drafts = self._config.spec.draft_tokens
        if not drafts:
            return {}
        return {op.request_id: self._rng.randint(0, drafts) for op in self._added[-10:]}

    def _reset(self) -> None:
        """Bring everything to an end first, as a reset needs."""
        while self._num_open:
            self._complete()
        self._ops += [Abort(op.request_id) for op in self._added]
        self._ops.append(Reset())

    def _add(self) -> None:
        rng = self._rng
        index = len(self._added)
        prompt = self._prompt()
        most = self._max_tokens - num_tokens(prompt)
        max_new = min(most, rng.choice((1, 2, rng.randint(1, 6), rng.randint(4, 24))))
        op = Add(
            request_id=f"r{index}",
            prompt=prompt,
            max_new=max_new,
            output=(Segment(_OUTPUT_STREAM + index, 0, max_new),),
            salt=rng.choice(_SALTS),
            priority=rng.randint(0, 3),
        )
        self._added.append(op)
        self._ops.append(op)

    def _prompt(self) -> tuple[Segment, ...]:
        """At most `self._max_tokens - 1` tokens: one is left for the output."""
        rng = self._rng
        choice = rng.random()
        if self._added and choice < 0.2:
            prompt = rng.choice(self._added).prompt
        elif self._added and choice < 0.6:
            prompt = self._next_turn(rng.choice(self._added))
        else:
            stream = rng.randint(1, _NUM_SHARED_STREAMS)
            prompt = (Segment(stream, 0, self._length()),)
            if rng.random() < 0.5:
                prompt += (self._suffix(),)
        return _cut(prompt, self._max_tokens - 1)

    def _next_turn(self, earlier: Add) -> tuple[Segment, ...]:
        """An earlier prompt, some or all of its answer, and perhaps a new question."""
        rng = self._rng
        answer = rng.choice((earlier.max_new, max(1, earlier.max_new - 1), 1))
        prompt = earlier.prompt + _cut(earlier.output, answer)
        return (*prompt, self._suffix()) if rng.random() < 0.8 else prompt

    def _suffix(self) -> Segment:
        rng = self._rng
        length = rng.choice((1, rng.randint(1, self._config.page_tokens), self._length()))
        return Segment(_SUFFIX_STREAM + len(self._ops), 0, length)

    def _length(self) -> int:
        """Tokens: often whole pages or units, or one more or less."""
        rng, page, unit = self._rng, self._config.page_tokens, self._config.unit_tokens
        most = min(self._max_tokens, 6 * page)
        step = rng.choice((page, page, unit, 1))
        length = step * rng.randint(1, max(1, most // step)) + rng.choice((-1, 0, 0, 1))
        return max(1, length)


def _cut(segments: tuple[Segment, ...], most: int) -> tuple[Segment, ...]:
    """The first `most` tokens of a sequence, `most` >= 1."""
    kept: list[Segment] = []
    for segment in segments:
        length = min(segment.end - segment.start, most)
        if length:
            kept.append(segment._replace(end=segment.start + length))
        most -= length
    return tuple(kept)
