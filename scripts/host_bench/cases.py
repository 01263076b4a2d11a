"""Cache calls and prefix keys, against the baseline. Every function returns finished `Result`s."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from host_bench import workloads
from host_bench.baseline import Baseline
from host_bench.calls import Script, Source, recorded_calls, scheduled_calls
from host_bench.clock import Clock
from host_bench.replay import Replay, Timing
from host_bench.report import Bound, Result, against_vllm

from serving.page_table import chain_of, extend_chain
from serving.replay.trace import Segment, token_ids

_VOCAB_SIZE = 50021


class Bench(NamedTuple):
    """How to measure.

    Attributes:
      repeats: of each case.
      baseline: the other engine, if there is one.
    """

    repeats: int
    baseline: Baseline | None
    now: Clock


class DifferentAnswers(Exception):
    """The engines did not do the same: their times cannot be compared."""


def golden(folder: Path, bench: Bench) -> list[Result]:
    """The calls of the recorded traces, each trace alone and all together.

    Raises:
      ValueError: there is none in the folder.
    """
    paths = sorted(folder.glob("g*.json"))
    if not paths:
        raise ValueError(f"{folder} has no traces; expected files g*.json")
    results: list[Result] = []
    for path in paths:
        script = recorded_calls(json.loads(path.read_text()))
        results.append(_compare(f"golden/{path.stem}", [script], bench))
    return [*results, _together("golden/all", results)]


def random_traces(seed: int, bench: Bench) -> list[Result]:
    """Random workloads: conversations with the pages of Kimi K3, in a large pool and in one that
    evicts; conversations with short pages; and those that the replay's tests use."""
    turns = workloads.Chat(
        conversations=32,
        turns=3,
        system_tokens=(1000, 6000),
        turn_tokens=(50, 2000),
        answer_tokens=(16, 160),
    )
    short = workloads.Chat(
        conversations=16,
        turns=3,
        system_tokens=(200, 2000),
        turn_tokens=(10, 600),
        answer_tokens=(8, 64),
    )
    traces = (
        workloads.chat("k3_chat", workloads.k3_config(usable_pages=4000), turns, seed),
        workloads.chat("k3_chat_evicting", workloads.k3_config(usable_pages=420), turns, seed),
        workloads.chat("short_pages", workloads.short_config(usable_pages=20_000), short, seed),
    )
    results = [
        _compare(f"random/{trace.name}", [scheduled_calls(trace)], bench) for trace in traces
    ]
    many = [scheduled_calls(trace) for trace in workloads.replay_workloads(60, seed)]
    return [*results, _compare("random/edge_lengths", many, bench, may_differ=True)]


def long_lookup(num_tokens: int, bench: Bench) -> list[Result]:
    """Lookups of a long prompt, keys given: the prompt again; one that leaves it shortly before its
    end, so that no state fits; and an unrelated one."""
    config = workloads.k3_config(
        usable_pages=2 * num_tokens // 1536 + 64, max_model_tokens=2 * num_tokens
    )
    script = scheduled_calls(workloads.one_prompt(config, num_tokens))
    early = num_tokens - config.page_tokens - config.unit_tokens
    prompts = {
        "again": (Segment(1, 0, num_tokens),),
        "diverging": (Segment(1, 0, early), Segment(2, early, num_tokens)),
        "unrelated": (Segment(3, 0, num_tokens),),
    }
    results: list[Result] = []
    for name, prompt in prompts.items():
        source = Source(tokens=token_ids(prompt), prompt_tokens=num_tokens, salt="")
        calls = [["plan"], *[["lookup", name, num_tokens]] * bench.repeats]
        longer = script.followed_by({name: source}, calls)
        ours = Replay(longer, bench.now).run()
        samples = {"ours": _milliseconds(ours.ns[-bench.repeats :])}
        if bench.baseline is not None:
            theirs = bench.baseline.replay(longer)
            _check_answers(name, "vllm", theirs.answers, ours.answers)
            samples["vllm"] = _milliseconds(theirs.ns[-bench.repeats :])
        hit, junction = ours.answers[-1]
        shapes = {
            "tokens": num_tokens,
            "page_tokens": config.page_tokens,
            "unit_tokens": config.unit_tokens,
            "hit": hit,
            "junction": junction,
        }
        bound = Bound("at most", 20.0, "goal") if num_tokens >= 1_000_000 else None
        results.append(
            Result(case=f"lookup/{name}", unit="ms", shapes=shapes, samples=samples, bound=bound)
        )
    return results


def hashing(num_tokens: int, unit_tokens: int, bench: Bench) -> list[Result]:
    """Prefix keys of a prompt, as MB of int32 ids a second."""
    array = (np.arange(num_tokens) * 7919 % _VOCAB_SIZE).astype(np.int32)
    ids = tuple(array.tolist())
    num_bytes = array.nbytes
    samples: dict[str, dict[str, list[float]]] = {"tuple": collections.defaultdict(list)}
    samples["array"] = collections.defaultdict(list)
    for _ in range(bench.repeats):
        for form, tokens in (("tuple", ids), ("array", array)):
            start = bench.now()
            extend_chain(chain_of("", unit_tokens), tokens)
            samples[form]["ours"].append(num_bytes * 1e3 / (bench.now() - start))
        if bench.baseline is not None:
            taken = bench.baseline.hash_ns(num_tokens, unit_tokens)
            samples["tuple"]["vllm"].append(num_bytes * 1e3 / taken)
    return [
        Result(
            case=f"hash/{form}",
            unit="MB/s",
            shapes={"tokens": num_tokens, "unit_tokens": unit_tokens},
            samples=values,
            bound=Bound("at least", 100.0, "goal"),
        )
        for form, values in samples.items()
    ]


# ---- comparison of replays ----


def _compare(
    case: str,
    scripts: Sequence[Script],
    bench: Bench,
    *,
    may_differ: bool = False,
) -> Result:
    """Microseconds a request; the engines take turns.

    Args:
      may_differ: leave out scripts that the baseline answers differently, and count them.

    Raises:
      DifferentAnswers: an engine does not answer as the script says.
    """
    samples: dict[str, list[float]] = {}
    ns: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    counts = collections.Counter[str]()
    num_requests = num_left_out = 0
    for script in scripts:
        if may_differ and not _agrees(bench.baseline, script):
            num_left_out += 1
            continue
        num_requests += len(script.requests)
        counts.update(call[0] for call in script.calls)
        runs: dict[str, list[Timing]] = collections.defaultdict(list)
        for _ in range(bench.repeats):
            runs["ours"].append(Replay(script, bench.now).run())
            if bench.baseline is not None:
                runs["vllm"].append(bench.baseline.replay(script))
        for engine, timings in runs.items():
            for timing in timings:
                _check_answers(f"{case} ({script.name})", engine, timing.answers, script.answers)
            totals = samples.setdefault(engine, [0.0] * bench.repeats)
            samples[engine] = [a + sum(b.ns) for a, b in zip(totals, timings, strict=True)]
            by_call = zip(*(timing.ns for timing in timings), strict=True)
            for call, values in zip(script.calls, by_call, strict=True):
                ns[engine][call[0]] += int(statistics.median(values))
    samples = {
        engine: [total / num_requests / 1e3 for total in totals]
        for engine, totals in samples.items()
    }
    parts = {
        f"{call}_call": {engine: taken[call] / count / 1e3 for engine, taken in ns.items()}
        for call, count in counts.items()
    }
    shapes: dict[str, Any] = {"requests": num_requests, "calls": dict(counts)}
    if may_differ:
        shapes |= {"workloads": len(scripts) - num_left_out, "left_out": num_left_out}
    if len(scripts) == 1:
        config = scripts[0].config
        shapes |= {
            "usable_pages": config.usable_pages,
            "page_tokens": config.page_tokens,
            "unit_tokens": config.unit_tokens,
            "recurrent_groups": len(config.recurrent_groups),
            "prompt_tokens": sum(one.prompt_tokens for one in scripts[0].requests.values()),
        }
    return Result(
        case=case,
        unit="us/request",
        shapes=shapes,
        samples=samples,
        parts=parts,
        bound=against_vllm(samples),
    )


def _together(case: str, results: Sequence[Result]) -> Result:
    """Several cases as one: their samples in order, weighted by their requests."""
    weights = [result.shapes["requests"] for result in results]
    engines = results[0].samples.keys()
    samples = {
        engine: [
            sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            for values in zip(*(result.samples[engine] for result in results), strict=True)
        ]
        for engine in engines
    }
    calls = collections.Counter[str]()
    taken: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        for call, count in result.shapes["calls"].items():
            calls[call] += count
            for engine, mean in result.parts[f"{call}_call"].items():
                taken[f"{call}_call"][engine] += mean * count
    parts = {
        part: {engine: value / calls[part.removesuffix("_call")] for engine, value in one.items()}
        for part, one in taken.items()
    }
    return Result(
        case=case,
        unit="us/request",
        shapes={"requests": sum(weights), "calls": dict(calls), "traces": len(results)},
        samples=samples,
        parts=parts,
        bound=against_vllm(samples),
    )


def _agrees(baseline: Baseline | None, script: Script) -> bool:
    return baseline is None or baseline.replay(script).answers == list(script.answers)


def _check_answers(name: str, engine: str, got: Sequence[Any], expected: Sequence[Any]) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one != other:
            raise DifferentAnswers(
                f"{name}: call {index} is answered differently by {engine}: got {one}; expected "
                f"{other}"
            )


def _milliseconds(ns: Iterable[int]) -> list[float]:
    return [taken / 1e6 for taken in ns]
