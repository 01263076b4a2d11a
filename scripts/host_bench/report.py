"""Results of the host benchmark: one JSON line a case, and a table."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

_PACKAGES = ("k3jax", "numpy", "immutables")


class Bound(NamedTuple):
    """What a median is compared with; `source` says whose number it is."""

    kind: Literal["at most", "at least"]
    value: float
    source: str

    def holds(self, median: float) -> bool:
        return median <= self.value if self.kind == "at most" else median >= self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case.

    Attributes:
      shapes: sizes that define the case.
      samples: measured values by engine, `ours` first; the engines took turns.
      parts: medians of the parts of a sample, by part and engine.
      bound: None if nobody asked for one.
    """

    case: str
    unit: str
    shapes: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]
    parts: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    bound: Bound | None = None

    @property
    def medians(self) -> dict[str, float]:
        return {engine: statistics.median(values) for engine, values in self.samples.items()}

    @property
    def ratio(self) -> float | None:
        """Ours to the baseline's; None without one."""
        medians = self.medians
        return medians["ours"] / medians["vllm"] if "vllm" in medians else None

    def to_json(self) -> dict[str, Any]:
        bound = self.bound
        return {
            "case": self.case,
            "unit": self.unit,
            "shapes": dict(self.shapes),
            "samples": {engine: list(values) for engine, values in self.samples.items()},
            "median": self.medians,
            "ratio": self.ratio,
            "parts": self.parts,
            "bound": None if bound is None else bound._asdict(),
            "holds": None if bound is None else bound.holds(self.medians["ours"]),
        }


def against_vllm(samples: Mapping[str, Sequence[float]]) -> Bound | None:
    """The baseline's median as a bound."""
    if "vllm" not in samples:
        return None
    return Bound("at most", statistics.median(samples["vllm"]), "vLLM in the same run")


def circumstances(clock: str, baseline: Mapping[str, str] | None) -> dict[str, Any]:
    """Commit, machine, versions and clock, the same for every line of a run."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "commit": _commit(),
        "device": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": sys.version.split()[0],
        },
        "clock": clock,
        "versions": {**versions, "baseline": dict(baseline) if baseline else None},
    }


def table(results: Sequence[Result]) -> str:
    """All cases as text."""
    rows = [("case", "ours", "vLLM", "ratio", "unit", "bound", "")]
    for result in results:
        medians, bound = result.medians, result.bound
        rows.append(
            (
                result.case,
                f"{medians['ours']:.4g}",
                f"{medians['vllm']:.4g}" if "vllm" in medians else "-",
                f"{result.ratio:.2f}" if result.ratio is not None else "-",
                result.unit,
                f"{bound.kind} {bound.value:.4g}" if bound else "-",
                ("yes" if bound.holds(medians["ours"]) else "NO") if bound else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _commit() -> str:
    """Of the checkout; `+` marks changes to it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
