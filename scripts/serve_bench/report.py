"""Summaries of loads: one JSON line a rate, a table, a plot."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serve_bench.load import Sample

Line = dict[str, Any]
_PERCENTILES = (50, 95, 99)
HEADER = (
    f"{'req/s':>7}{'sent':>6}{'done':>6}{'other':>6}{'tok/s':>8}"
    f"{'TTFT p50':>10}{'p95':>8}{'p99':>8}{'TPOT p50':>10}{'p95':>8}{'p99':>8}"
    f"{'goodput':>9}{'reused':>8}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What a good answer keeps to, in seconds: to its first token, and for each one behind it."""

    first_token_s: float
    token_s: float

    def is_met(self, sample: Sample) -> bool:
        """Whether an answer that was read to its end was good."""
        if sample.status != "OK" or sample.first_token_s is None:
            return False
        return sample.first_token_s <= self.first_token_s and (sample.token_s or 0) <= self.token_s


def summary(rate: float, samples: Sequence[Sample], goal: Goal) -> Line:
    """What a load came to. Rates are over the time until its last answer ended.

    `goodput` counts the good answers a second; `token_ms` are means of single requests.
    """
    statuses = collections.Counter(sample.status for sample in samples)
    done = [sample for sample in samples if sample.status == "OK"]
    wall_s = max((sample.at_s + (sample.end_s or 0) for sample in samples), default=0.0)
    prompt = sum(sample.prompt_tokens for sample in done)
    line: Line = {
        "rate": rate,
        "sent": len(samples),
        "statuses": dict(statuses),
        "wall_s": wall_s,
        "tokens_per_s": sum(sample.tokens for sample in samples) / wall_s if wall_s else 0.0,
        "goodput": sum(map(goal.is_met, samples)) / wall_s if wall_s else 0.0,
        "goal": dataclasses.asdict(goal),
        "reused_share": sum(sample.cached_tokens for sample in done) / prompt if prompt else 0.0,
    }
    for name, values in (
        ("first_token_ms", [sample.first_token_s for sample in done]),
        ("token_ms", [sample.token_s for sample in done]),
    ):
        found = [1000 * value for value in values if value is not None]
        line[name] = {
            f"p{percent}": float(np.percentile(found, percent)) for percent in _PERCENTILES if found
        }
    return line


def row(line: Line) -> str:
    """A line of the table; times are in milliseconds."""
    times = "".join(
        f"{line[name].get(f'p{percent}', float('nan')):>{10 if percent == 50 else 8}.1f}"
        for name in ("first_token_ms", "token_ms")
        for percent in _PERCENTILES
    )
    done = line["statuses"].get("OK", 0)
    return (
        f"{line['rate']:>7g}{line['sent']:>6}{done:>6}{line['sent'] - done:>6}"
        f"{line['tokens_per_s']:>8.0f}{times}{line['goodput']:>9.2f}{line['reused_share']:>8.1%}"
    )


def plot(lines: Sequence[Line], path: Path) -> None:
    """Draw times and goodput against the rate, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "k3jax", "font.size": 9})
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    rates = [line["rate"] for line in lines]
    for panel, name, title in (
        (panels[0], "first_token_ms", "time to first token, ms"),
        (panels[1], "token_ms", "time per token behind it, ms"),
    ):
        for percent in _PERCENTILES:
            values = [line[name].get(f"p{percent}", float("nan")) for line in lines]
            panel.plot(rates, values, marker="o", label=f"p{percent}")
        panel.set_title(title)
        panel.set_yscale("log")
        panel.legend(frameon=False)
    panels[2].plot(rates, [line["goodput"] for line in lines], marker="o", label="good")
    panels[2].plot(rates, rates, linestyle="dashed", color="black", label="sent")
    panels[2].set_title("requests a second")
    panels[2].legend(frameon=False)
    for panel in panels:
        panel.set_xlabel("requests sent a second")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
