"""Read a trace from decoded JSON. The first malformed value raises a `TraceError` that names it."""

from __future__ import annotations

import dataclasses
from typing import cast

from serving.replay import fields
from serving.replay.answers import Answers, CopyKind, CopyName, EntryName, Reuse
from serving.replay.fields import Fields, TraceError, boolean, integer, list_of, map_of, row_of
from serving.replay.trace import (
    Abort,
    Add,
    Complete,
    Group,
    GroupKind,
    Op,
    Policy,
    Probe,
    Reset,
    Schedule,
    SchedulerConfig,
    Segment,
    SpecConfig,
    Step,
    Tier,
    Trace,
    TraceConfig,
    TraceItem,
    num_tokens,
)

FORMAT = 1

_count = integer(0)
_positive = integer(1)
_integer = integer(-(2**31), 2**31 - 1)
_NONE: frozenset[object] = frozenset()


def parse_trace(data: object) -> Trace:
    """Check a decoded JSON file and turn it into a trace.

    Raises:
      TraceError: a field is missing, unknown or malformed.
    """
    top = Fields(data, "")
    top.take("format", fields.one_of(FORMAT))
    top.ignore("source", "tags", "notes", "stats")
    trace = Trace(
        name=top.take("name", fields.name),
        tier=cast("Tier", top.take("tier", fields.one_of("core", "policy"))),
        config=top.take("config", _config),
        items=top.take("trace", list_of(_item)),
    )
    top.finish()
    _check_sequence(trace)
    return trace


def is_index(data: object) -> bool:
    """Whether a decoded JSON file lists traces, as `index.json` beside them does."""
    return isinstance(data, dict) and "scenarios" in data and "trace" not in data


def _config(value: object, path: str) -> TraceConfig:
    read = Fields(value, path)
    config = TraceConfig(
        usable_pages=read.take("usable_pages", _positive),
        page_tokens=read.take("page_tokens", _positive),
        unit_tokens=read.take("match_unit", _positive),
        groups=read.take("groups", list_of(_group)),
        retention_tokens=read.take("retention", fields.optional(_count)),
        caching=read.take("caching", boolean),
        scheduler=read.take("scheduler", _scheduler),
        spec=read.take("spec", _spec),
    )
    read.finish()
    if config.page_tokens % config.unit_tokens:
        expected = f"a divisor of page_tokens, {config.page_tokens}"
        raise TraceError(f"{path}.match_unit", config.unit_tokens, expected)
    kinds = [group.kind for group in config.groups]
    if kinds.count("full") != 1:
        raise TraceError(f"{path}.groups", kinds, "exactly one group of kind 'full'")
    if len({group for group in config.groups if group.kind == "recurrent"}) > 1:
        raise TraceError(f"{path}.groups", kinds, "recurrent groups that are alike")
    return config


def _group(value: object, path: str) -> Group:
    read = Fields(value, path)
    kind = cast("GroupKind", read.take("kind", fields.one_of("full", "recurrent")))
    group = Group(kind=kind)
    if kind == "recurrent":
        align = read.take_or("checkpoint_align", fields.optional(_positive), None)
        group = Group(
            kind=kind,
            spec_slots=read.take_or("spec_slots", _count, 0),
            can_export=read.take_or("checkpoint_pages", integer(0, 1), 0) == 1,
            export_align_tokens=align or 1,
        )
    read.finish()
    return group


def _scheduler(value: object, path: str) -> SchedulerConfig:
    read = Fields(value, path)
    config = SchedulerConfig(
        max_step_tokens=read.take("max_tokens_per_step", _positive),
        max_running=read.take("max_running", _positive),
        long_prefill_cap_tokens=read.take_or("long_prefill_cap", _count, 0),
        reserve_full_prompt=read.take("reserve_full_prompt", boolean),
        watermark=read.take_or("watermark", fields.fraction, 0.0),
        policy=cast("Policy", read.take("policy", fields.one_of("fcfs", "priority"))),
        async_depth=read.take_or("async_depth", integer(1, 2), 1),
        max_model_tokens=read.take_or("max_model_len", integer(2), 100000),
    )
    read.finish()
    return config


def _spec(value: object, path: str) -> SpecConfig:
    read = Fields(value, path)
    config = SpecConfig(
        draft_tokens=read.take_or("draft_tokens", _count, 0),
        lookahead_slots=read.take_or("lookahead_slots", _count, 0),
        tail_drop=read.take_or("tail_drop", boolean, False),
        shared_prefix_checkpoint=read.take_or("shared_prefix_checkpoint", boolean, False),
        hash_lookahead_tokens=read.take_or("hash_lookahead", _count, 0),
    )
    read.finish()
    return config


def _item(value: object, path: str) -> TraceItem:
    read = Fields(value, path)
    op = read.take("op", _op)
    expect = read.take_or("expect", _answers, None)
    read.finish()
    if expect is not None and not isinstance(op, Add | Probe):
        expect = _fill_in(op, expect)
    return TraceItem(op, expect)


def _op(value: object, path: str) -> Op:
    read = Fields(value, path)
    kinds = ("add", "step", "schedule", "complete", "abort", "reset", "probe")
    kind = read.take("op", fields.one_of(*kinds))
    op: Op
    match kind:
        case "add":
            op = _add(read, path)
        case "step":
            op = Step(_accept(read))
        case "schedule":
            op = Schedule()
        case "complete":
            op = Complete(_accept(read))
        case "abort":
            op = Abort(read.take("id", fields.name))
        case "reset":
            op = Reset()
        case _:
            op = Probe(_segments(read, "prompt"), read.take_or("salt", fields.text, ""))
    read.finish()
    return op


def _accept(read: Fields) -> dict[str, int]:
    return read.take_or("accept", map_of(_count), dict[str, int]())


def _add(read: Fields, path: str) -> Add:
    op = Add(
        request_id=read.take("id", fields.name),
        prompt=_segments(read, "prompt"),
        max_new=read.take("max_new", _positive),
        output=_segments(read, "output"),
        salt=read.take_or("salt", fields.text, ""),
        priority=read.take_or("priority", _integer, 0),
    )
    if num_tokens(op.output) < op.max_new:
        expected = f"at least max_new, {op.max_new}, tokens"
        raise TraceError(f"{path}.output", num_tokens(op.output), expected)
    return op


def _segments(read: Fields, name: str) -> tuple[Segment, ...]:
    rows = read.take(name, list_of(row_of(_count, _count, _count)))
    segments = tuple(Segment(*cast("tuple[int, int, int]", row)) for row in rows)
    for index, segment in enumerate(segments):
        if segment.end <= segment.start:
            path = f"{read.path(name)}[{index}]"
            raise TraceError(path, list(segment), "[stream, start, end] with start < end")
    if not segments:
        raise TraceError(read.path(name), [], "at least one segment")
    return segments


def _answers(value: object, path: str) -> Answers:
    read = Fields(value, path)
    # `calls`, `zeroed` and `not_admitted` tell how another design came to its answers.
    read.ignore("calls", "zeroed", "not_admitted", "prompt_tokens")
    scheduled = read.take_or("scheduled", map_of(_positive), None)
    answers = Answers(
        scheduled=None if scheduled is None else tuple(scheduled.items()),
        drafts=read.take_or("drafts", map_of(_positive), None),
        admitted=read.take_or("admitted", map_of(_reuse), None),
        preempted=read.take_or("preempted", _names, None),
        copies=read.take_or("copies", _copies, None),
        held=read.take_or("held", map_of(list_of(_count)), None),
        free_after_schedule=read.take_or("free_after_schedule", _count, None),
        free=read.take_or("free", _count, None),
        sampled=read.take_or("sampled", map_of(_positive), None),
        finished=read.take_or("finished", _names, None),
        registered=read.take_or("registered", _entries, None),
        evicted=read.take_or("evicted", _entries, None),
        dropped=read.take_or("dropped", _entries, None),
        entries=read.take_or("entries", _count, None),
        hit=read.take_or("hit", _count, None),
        junction=read.take_or("junction", _count, None),
        group_hits=read.take_or("group_hits", list_of(_count), None),
        ok=read.take_or("ok", boolean, None),
    )
    read.finish()
    return answers


def _names(value: object, path: str) -> frozenset[str]:
    return frozenset(list_of(fields.name)(value, path))


def _reuse(value: object, path: str) -> Reuse:
    read = Fields(value, path)
    reuse = Reuse(hit=read.take("hit", _count), junction=read.take("junction", _count))
    read.finish()
    return reuse


def _copies(value: object, path: str) -> frozenset[CopyName]:
    kind = fields.one_of("resume", "preserve")
    rows = list_of(row_of(_count, fields.name, kind, _count))(value, path)
    return frozenset(CopyName(*cast("tuple[int, str, CopyKind, int]", row)) for row in rows)


def _entries(value: object, path: str) -> frozenset[EntryName]:
    rows = list_of(row_of(_count, fields.name, _count))(value, path)
    return frozenset(EntryName(*cast("tuple[int, str, int]", row)) for row in rows)


def _fill_in(op: Op, expect: Answers) -> Answers:
    """A recording leaves out what is empty."""
    empty: dict[str, object] = {"registered": _NONE, "evicted": _NONE, "dropped": _NONE}
    if isinstance(op, Step | Schedule):
        empty |= {"drafts": {}, "admitted": {}, "preempted": _NONE, "copies": _NONE}
    if isinstance(op, Step | Complete):
        empty["finished"] = _NONE
    missing = {name: value for name, value in empty.items() if getattr(expect, name) is None}
    return dataclasses.replace(expect, **missing)


def _check_sequence(trace: Trace) -> None:
    """Operations that need others before them."""
    open_steps = 0
    added: set[str] = set()
    for index, item in enumerate(trace.items):
        path = f"trace[{index}].op"
        match item.op:
            case Add(request_id=request_id):
                if request_id in added:
                    raise TraceError(f"{path}.id", request_id, "an id that was not used before")
                added.add(request_id)
            case Abort(request_id=request_id):
                if request_id not in added:
                    raise TraceError(f"{path}.id", request_id, "the id of a request added before")
            case Schedule():
                open_steps += 1
            case Step():
                if open_steps:
                    raise TraceError(f"{path}.op", "step", "no scheduled step that is open")
            case Complete():
                if not open_steps:
                    raise TraceError(f"{path}.op", "complete", "a scheduled step that is open")
                open_steps -= 1
            case _:
                pass
