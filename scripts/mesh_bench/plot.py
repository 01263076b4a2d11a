"""A plot of the mesh benchmarks: one panel for each section, times over sizes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mesh_bench.report import Line, series


def draw(results: Sequence[Line], path: Path) -> None:
    """Draw all times as an SVG; the same results, the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "k3jax", "font.size": 7})
    panels = series(results)
    figure = Figure(figsize=(8, 0.5 + 2.8 * len(panels)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False)[:, 0]
    for panel, ((section, unit), lines) in zip(axes, panels.items(), strict=False):
        for label, points in lines.items():
            panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_ylim(bottom=0)
        panel.set_ylabel(unit)
        panel.set_title(section, loc="left", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=6)
    figure.savefig(path, format="svg", metadata={"Date": None})
