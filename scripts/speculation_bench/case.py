"""What a workload gave with one way of drafting: rounds, and the JSON line made of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from speculation_bench.measure import Played
from speculation_bench.variants import Variant

GOAL_ACCEPTED = 3.7  # tokens of a step on the low-entropy workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts as token ids, and how they are answered."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    new_tokens: int

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclasses.dataclass(kw_only=True)
class Case:
    """Filled while the benchmark runs.

    Attributes:
      rounds: one a repeat.
      device_s: of a full step.
      different: where greedy answers part from those without drafts; None before they are compared.
      failure: why there are no further rounds.
    """

    workload: Workload
    variant: Variant
    rounds: list[Played] = dataclasses.field(default_factory=list[Played])
    device_s: float | None = None
    different: list[dict[str, Any]] | None = None
    failure: str | None = None

    def compare(
        self, expected: Sequence[Sequence[int]], gap: Callable[[int, int, int], float | None]
    ) -> None:
        """Find where the first round's answers part from the expected ones.

        Args:
          gap: how far the logits of two tokens are apart, as a share of the largest: by prompt,
            place in the answer, and the token that is not the expected one; None if not known.
        """
        self.different = []
        for prompt, (got, want) in enumerate(zip(self.rounds[0].tokens, expected, strict=True)):
            if got != want:
                place = next(i for i in range(len(want)) if got[i] != want[i])
                apart = gap(prompt, place, got[place])
                self.different.append({"prompt": prompt, "place": place, "gap": apart})

    def to_json(self) -> dict[str, Any]:
        variant, workload = self.variant, self.workload
        line: dict[str, Any] = {
            "case": f"{workload.name}/{variant.name}",
            "workload": workload.name,
            "variant": variant.name,
            "drafter": variant.drafter,
            "num_drafts": variant.num_drafts,
            "draft_cost": variant.cost,
            "shapes": {
                "prompts": len(workload.prompts),
                "prompt_tokens": [len(prompt) for prompt in workload.prompts],
                "new_tokens": workload.new_tokens,
                "temperature": workload.temperature,
            },
        }
        if self.device_s is not None:
            line["device_ms"] = 1e3 * self.device_s
        if self.rounds:
            line |= self._measured()
        if self.different is not None:
            line["different"] = self.different
        if workload.is_greedy and variant.drafter == "dspark":
            line["bound"] = {"accepted_per_step": GOAL_ACCEPTED}
        return line | ({"failure": self.failure} if self.failure else {})

    def _measured(self) -> dict[str, Any]:
        samples = [played.tokens_per_s for played in self.rounds]
        steps = [step for played in self.rounds for step in played.steps]
        intervals = [seconds for played in self.rounds for seconds in played.step_s]
        places = range(1, 1 + self.variant.num_drafts)
        return {
            "unit": "tokens/s",
            "samples": samples,
            "median": statistics.median(samples),
            "step_ms": 1e3 * statistics.median(intervals) if intervals else None,
            "steps": len(steps),
            "accepted_per_step": 1 + statistics.fmean(step.num_taken for step in steps),
            "tried_per_step": statistics.fmean(step.num_drafts for step in steps),
            "tried_by_place": [sum(step.num_drafts >= place for step in steps) for place in places],
            "taken_by_place": [sum(step.num_taken >= place for step in steps) for place in places],
            # The same seeds: a round that answers otherwise has rounded otherwise.
            "unsteady_rounds": sum(
                played.tokens != self.rounds[0].tokens for played in self.rounds[1:]
            ),
        }
