"""The run: compile everything, warm up, then let all cases take turns until time is up."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from speculation_bench.case import Case, Workload
from speculation_bench.measure import device_step_s, play
from speculation_bench.prompts import LOW_ENTROPY, MAX_CHARS, high_entropy
from speculation_bench.variants import Builds, Built, Variant, choose_variants, describe

from k3jax.config import EngineConfig
from pallas_kernels.settings import KernelSettings
from serving.build import LoadedModel, load_model
from serving.score import Scorer
from serving.tokenizer import load_folder
from sharding.axes import ParallelConfig
from sharding.devices import prepare_devices

_WARM_UP_TOKENS = 20
_GRACE_S = 5.0  # for what has begun when time is up
_Line = dict[str, Any]
_Tokens = tuple[tuple[int, ...], ...]


def run(args: argparse.Namespace, known: Mapping[str, Any]) -> list[_Line]:
    """Measure, and return one line a case.

    Args:
      known: circumstances, for every line.

    Raises:
      ConfigError, WeightError, ValueError: the models or their tokenizer cannot be used.
    """
    start_s = time.monotonic()
    prepare_devices(1)
    device = jax.devices()[0].device_kind
    bench = Run(args, {**known, "device": device}, start_s)
    bench.say(f"device: {device}")
    engine = EngineConfig(
        dtype=args.dtype, max_rows=1, max_prefill_rows=1, max_context_tokens=args.context,
        draft_sampling=args.draft_sampling,
        kernels=KernelSettings(implementation=None if args.kernels == "auto" else args.kernels),
    )  # fmt: skip
    loaded = load_model(args.model, engine, ParallelConfig(), draft_dir=args.draft)
    _check_draft(loaded, args.drafts)
    variants = choose_variants(
        args.drafts, ngram_drafts=args.ngram_drafts, adaptive_cost=args.draft_cost
    )
    workloads = _workloads(args)
    bench.cases = [Case(workload=one, variant=variant) for one in workloads for variant in variants]
    longest = max(len(prompt) for one in workloads for prompt in one.prompts) + args.new_tokens
    builds = Builds(loaded, variants, score_tokens=longest)
    built, scorer = bench.build(builds)
    gc.collect()
    gc.freeze()  # as the server does
    for variant in built:
        bench.warm_up(variant, built[variant])
    bench.say("warm")
    bench.take_turns(built)
    bench.compare(scorer)
    bench.write()
    return bench.lines()


def _check_draft(loaded: LoadedModel, drafts: Sequence[int]) -> None:
    """Refuse a draft model of another target, or that makes too few drafts."""
    draft = loaded.draft
    assert draft is not None
    draft.check_target(loaded.cfg)
    if max(drafts) > draft.num_drafts:
        raise ValueError(
            f"--drafts is too large: got {max(drafts)}; expected at most the {draft.num_drafts} of "
            "the draft model"
        )


def _workloads(args: argparse.Namespace) -> tuple[Workload, ...]:
    """Both workloads in the model's tokens.

    Raises:
      ValueError: the model has no tokenizer, or the context has no room.
    """
    tokenizer = load_folder(args.model)
    if tokenizer is None:
        raise ValueError(f"--model has no tokenizer: got {args.model}; expected one of its files")
    if args.context < MAX_CHARS + args.new_tokens:
        raise ValueError(
            f"--context is too small: got {args.context}; expected at least {MAX_CHARS} of a "
            f"prompt and {args.new_tokens} of --new-tokens"
        )
    texts = (("low entropy", 0.0, LOW_ENTROPY), ("high entropy", 1.0, high_entropy()))
    return tuple(
        Workload(
            name=name,
            prompts=tuple(tuple(tokenizer.encode(text)) for text in prompts[: args.prompts]),
            temperature=temperature,
            new_tokens=args.new_tokens,
        )
        for name, temperature, prompts in texts
    )


class Run:
    """State of a run.

    Args:
      known: circumstances, for every line.
      start_s: of the run, by the monotonic clock.
    """

    def __init__(self, args: argparse.Namespace, known: Mapping[str, Any], start_s: float):
        self._args = args
        self._known = known
        self._start_s = start_s
        self._end_s = start_s + args.total_s
        self._longest_s = 0.0
        self.cases: list[Case] = []

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def build(self, builds: Builds) -> tuple[dict[Variant, Built], Scorer | None]:
        """Wait for the compilation; what is not done in time fails."""
        built, failures, scorer = builds.wait(self._start_s + self._args.compile_s, self.say)
        for case in self.cases:
            case.failure = failures.get(case.variant)
        return built, scorer

    def warm_up(self, variant: Variant, built: Built) -> None:
        """Run a variant's programs for the first time, and time its step on the device."""
        mine = [case for case in self.cases if case.variant == variant]
        try:
            for case in mine:
                prompt = case.workload.prompts[0]
                _, row = play(
                    built, [prompt], temperature=case.workload.temperature,
                    max_tokens=min(_WARM_UP_TOKENS, case.workload.new_tokens),
                    until_s=self._case_end_s(),
                )  # fmt: skip
                case.device_s = device_step_s(built, row, case.workload.prompts[0])
        except Exception as error:
            self._fail(mine, error)

    def take_turns(self, built: Mapping[Variant, Built]) -> None:
        """Repeat all cases until there are enough repeats, or no time for another."""
        for case in self.cases * self._args.repeats:
            if case.failure is not None:
                continue
            if time.monotonic() + self._longest_s > self._end_s:
                self.say("time is up")
                break
            self._repeat(case, built[case.variant])
            self.write()
        for case in self.cases:
            if not case.rounds and case.failure is None:
                case.failure = "no time was left"

    def _repeat(self, case: Case, built: Built) -> None:
        workload, start_s = case.workload, time.monotonic()
        try:
            played, _ = play(
                built, workload.prompts, temperature=workload.temperature,
                max_tokens=workload.new_tokens, until_s=self._case_end_s(),
            )  # fmt: skip
        except Exception as error:
            self._fail([case], error)
            return
        self._longest_s = max(self._longest_s, time.monotonic() - start_s)
        case.rounds.append(played)
        self.say(f"{workload.name}, {case.variant.name}: {played.tokens_per_s:.0f} tokens/s")

    def compare(self, scorer: Scorer | None) -> None:
        """Compare greedy answers with those without drafts."""
        measured = [case for case in self.cases if case.workload.is_greedy and case.rounds]
        for plain in [case for case in measured if case.variant.drafter == "none"]:
            expected = plain.rounds[0].tokens
            gap = functools.partial(self._gap, scorer, plain.workload.prompts, expected)
            for case in measured:
                if case.workload is plain.workload:
                    case.compare(expected, gap)

    def _gap(
        self, scorer: Scorer | None, prompts: _Tokens, expected: _Tokens,
        prompt: int, place: int, token: int,
    ) -> float | None:  # fmt: skip
        """See `Case.compare`."""
        if scorer is None or time.monotonic() > self._end_s + _GRACE_S:
            return None
        known = (*prompts[prompt], *expected[prompt][:place])
        logits = scorer.score(np.array(known, np.int32))[-1]
        apart = abs(logits[token] - logits[expected[prompt][place]])
        return float(apart / np.abs(logits).max())

    def lines(self) -> list[_Line]:
        return [
            {**case.to_json(), **self._known} for case in self.cases if case.rounds or case.failure
        ]

    def write(self) -> None:
        """Write all that is known; a run that is cut off leaves its results."""
        if self._args.json is not None:
            self._args.json.write_text("".join(f"{json.dumps(line)}\n" for line in self.lines()))

    def _case_end_s(self) -> float:
        return min(time.monotonic() + self._args.case_s, self._end_s + _GRACE_S)

    def _fail(self, failed: list[Case], error: BaseException) -> None:
        for case in failed:
            case.failure = describe(error)
            self.say(f"{case.workload.name}, {case.variant.name}: {case.failure}")
