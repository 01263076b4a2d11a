"""Reading traces, and random ones: what is malformed is named, what is generated is well formed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from serving.replay import TraceError, generate, parse_trace
from serving.replay.answers import CopyName, EntryName, Reuse
from serving.replay.generate import max_request_tokens
from serving.replay.trace import Add, Complete, Schedule, Segment, num_tokens, token_ids

FOLDER = Path(__file__).parents[1] / "data" / "cache"
RESUME = json.loads((FOLDER / "g07_cow_resume_two_readers.json").read_text())


def changed(*path: str | int, value: Any) -> Any:
    """The file with one value replaced, or removed if `value` is `...`."""
    data = copy.deepcopy(RESUME)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


def test_tokens_are_spelled_out_by_the_formula():
    ids = token_ids((Segment(1, 0, 2), Segment(7, 3, 4)))
    assert ids == ((7919 + 17) % 50021, (7919 + 104729 + 17) % 50021, (55433 + 314187 + 17) % 50021)


def test_answers_are_read_and_empty_ones_filled_in():
    trace = parse_trace(RESUME)
    step = trace.items[6].expect
    assert step is not None
    assert step.scheduled == (("a", 1), ("b", 8))
    assert step.admitted == {"b": Reuse(hit=20, junction=0)}
    assert step.copies == {CopyName(0, "b", "resume", 20), CopyName(1, "b", "resume", 20)}
    assert step.registered == {EntryName(0, "b", 28), EntryName(1, "b", 28)}
    assert step.held == {"a": (2, 1), "b": (2, 1)}
    assert (step.preempted, step.evicted, step.drafts) == (frozenset(), frozenset(), {})


def test_operation_without_answers_has_none():
    trace = parse_trace(changed("trace", 1, "expect", value=...))
    assert trace.items[1].expect is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "format is malformed: got 2; expected one of 1"),
        (("tier",), "soft", "tier is malformed: got 'soft'; expected one of 'core', 'policy'"),
        (("config",), [], r"config is malformed: got \[\]; expected an object"),
        (("config", "caching"), ..., "config.caching is malformed: got None; expected the field"),
        (("config", "usable_pages"), 0, "config.usable_pages .* got 0; expected an integer >= 1"),
        (("config", "usable_pages"), True, "config.usable_pages .* got True"),
        (("config", "match_unit"), 5, "config.match_unit .* expected a divisor of page_tokens, 16"),
        (("config", "groups", 0, "kind"), "recurrent", "config.groups .* exactly one group"),
        (("config", "scheduler", "watermark"), 1.5, "watermark .* got 1.5; expected a number"),
        (("config", "spec", "drafts"), 1, "config.spec.drafts .* expected no such field"),
        (("trace", 0, "op", "op"), "put", r"trace\[0\].op.op is malformed: got 'put'"),
        (("trace", 0, "op", "prompt"), [], r"trace\[0\].op.prompt .* at least one segment"),
        (("trace", 0, "op", "prompt", 0), [1, 0], r"prompt\[0\] .* expected a list of 3 values"),
        (("trace", 0, "op", "prompt", 0), [1, 4, 4], r"prompt\[0\] .* expected \[stream, start"),
        (("trace", 0, "op", "max_new"), 13, "output is malformed: got 12; expected at least max_"),
        (("trace", 3, "op", "id"), "a", r"trace\[3\].op.id .* an id that was not used before"),
        (("trace", 1, "op"), {"op": "complete"}, r"trace\[1\].op.op .* a scheduled step that is"),
        (("trace", 1, "op"), {"op": "abort", "id": "z"}, r"trace\[1\].op.id .* added before"),
        (("trace", 1, "expect", "free"), -1, r"trace\[1\].expect.free .* got -1"),
        (("trace", 1, "expect", "registered", 0), [0, "a"], r"registered\[0\] .* a list of 3"),
    ],
)
def test_malformed_value_is_named(path: tuple[str | int, ...], value: Any, message: str):
    with pytest.raises(TraceError, match=message):
        parse_trace(changed(*path, value=value))


@pytest.mark.parametrize("seed", range(40))
def test_generated_workloads_fit_their_pool_and_close_their_steps(seed: int):
    trace = generate(seed)
    assert trace == generate(seed)
    most = max_request_tokens(trace.config)
    open_steps = 0
    for item in trace.items:
        match item.op:
            case Add() as op:
                assert num_tokens(op.prompt) + op.max_new <= most
                assert num_tokens(op.output) == op.max_new
            case Schedule():
                open_steps += 1
            case Complete():
                open_steps -= 1
            case _:
                pass
        assert 0 <= open_steps <= trace.config.scheduler.async_depth


def test_generated_workloads_cover_the_configurations():
    configs = [generate(seed).config for seed in range(200)]
    assert {len(config.recurrent_groups) for config in configs} == {0, 1, 2, 3}
    assert {config.caching for config in configs} == {True, False}
    assert {config.scheduler.policy for config in configs} == {"fcfs", "priority"}
    assert {config.scheduler.async_depth for config in configs} == {1, 2}
    assert {config.spec.draft_tokens for config in configs} == {0, 1, 2, 3}
    assert {config.spec.shared_prefix_checkpoint for config in configs} == {True, False}
    assert {config.spec.hash_lookahead_tokens for config in configs} == {0, 1}
    assert {group.can_export for config in configs for group in config.groups} == {True, False}
    budgets = [config.scheduler.max_step_tokens - config.page_tokens for config in configs]
    assert min(budgets) < 0 < max(budgets)
    assert None in {config.retention_tokens for config in configs}
    assert 0 in {config.retention_tokens for config in configs}
