"""Results of the reuse benchmark: one JSON line a case, a table, a plot."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("k3jax", "jax", "jaxlib", "numpy")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload on one configuration.

    Attributes:
      options: of the server.
      clients: requests that are sent at once.
      cached_tokens: of the prompts, by the server's count.
      new_tokens: of the prompts, that no cache could have had.
      num_different: answers that are not those of the server without reuse.
      seconds: of all requests together.
    """

    workload: str
    configuration: str
    options: Sequence[str]
    clients: int
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    num_different: int
    seconds: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def computed_share(self) -> float:
        return self.computed_tokens / self.prompt_tokens

    def to_json(self) -> dict[str, Any]:
        computed = {"computed_tokens": self.computed_tokens, "computed_share": self.computed_share}
        return dataclasses.asdict(self) | computed


def versions() -> dict[str, str]:
    """Of the packages that the answers depend on."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def table(cases: Sequence[Case]) -> str:
    """All cases as text."""
    head = ("workload", "clients", "configuration", "prompt", "computed", "share", "new", "answers")
    rows: list[tuple[str, ...]] = [(*head, "seconds")]
    workloads = list(dict.fromkeys(case.workload for case in cases))
    for case in sorted(cases, key=lambda case: (workloads.index(case.workload), case.clients)):
        rows.append(
            (
                case.workload,
                str(case.clients),
                case.configuration,
                f"{case.prompt_tokens:,}",
                f"{case.computed_tokens:,}",
                f"{case.computed_share:.1%}",
                f"{case.new_tokens / case.prompt_tokens:.1%}",
                f"{case.num_different} differ" if case.num_different else "equal",
                f"{case.seconds:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(cases: Sequence[Case], path: Path) -> None:
    """Write bars of the shares that were computed as an SVG file; the same cases, the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "k3jax", "font.size": 9})
    workloads, configurations, clients = (
        list(dict.fromkeys(getattr(case, name) for case in cases))
        for name in ("workload", "configuration", "clients")
    )
    by_place = {(case.clients, case.configuration, case.workload): case for case in cases}
    figure = Figure(figsize=(4.2 * len(clients), 3.4), layout="constrained")
    panels = figure.subplots(1, len(clients), sharey=True, squeeze=False)[0]
    width = 0.8 / len(configurations)
    for panel, num_clients in zip(panels, clients, strict=True):
        for i, configuration in enumerate(configurations):
            chosen = [by_place[num_clients, configuration, name] for name in workloads]
            bars = panel.bar(
                [
                    place + (i - (len(configurations) - 1) / 2) * width
                    for place in range(len(chosen))
                ],
                [100 * case.computed_share for case in chosen],
                width,
                label=configuration,
                color=f"C{i}",
            )
            panel.bar_label(bars, fmt="%.0f", fontsize=7)
        for place, name in enumerate(workloads):
            case = by_place[num_clients, configurations[0], name]
            new = 100 * case.new_tokens / case.prompt_tokens
            label = "new tokens" if place == 0 else None
            panel.hlines(new, place - 0.42, place + 0.42, "black", "dashed", label=label)
        panel.set_xticks(range(len(workloads)), workloads)
        panel.set_title("one client" if num_clients == 1 else f"{num_clients} clients")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("prompt tokens computed, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
