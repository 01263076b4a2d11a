"""Tables and a plot of what `scripts/bench_kernels.py --json` wrote.

    python scripts/report_kernels.py kernels.jsonl                      Markdown tables
    python scripts/report_kernels.py kernels.jsonl --plot kernels.svg   and a plot; needs matplotlib

Of several results of one case and implementation the last counts. A row of a table is one case;
`x floor` is the kernel's time over the floor, and the ratios say how much longer the others take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
Cases = Mapping[str, Mapping[str, Mapping[str, Line]]]  # operator -> shape -> implementation

KERNEL = "mosaic"


def main() -> int:
    args = _parse_args()
    text = "".join(path.read_text() for path in args.results)
    cases = _cases([json.loads(line) for line in text.splitlines()])
    print("\n\n".join(_table(op, shapes) for op, shapes in cases.items()))
    if args.plot is not None:
        _plot(cases, args.plot)
    return 0


def _cases(lines: Sequence[Line]) -> Cases:
    found: dict[str, dict[str, dict[str, Line]]] = {}
    for line in lines:
        shapes = found.setdefault(line["op"], {})
        shapes.setdefault(line["shape"], {})[line["implementation"]] = line
    return found


def _table(op: str, shapes: Mapping[str, Mapping[str, Line]]) -> str:
    """A Markdown table of one operator."""
    others = sorted({name for row in shapes.values() for name in row} - {KERNEL})
    head = ["Shape", "us", "GB/s", "TFLOP/s", "Floor, us", "x floor"]
    head += [column for name in others for column in (f"{name}, us", f"{name}, ratio")]
    rows = [head, ["---"] * len(head)]
    for shape, row in shapes.items():
        kernel = row.get(KERNEL, {})
        cells = [shape, *(_number(kernel.get(key)) for key in ("us", "gb_per_s", "tflop_per_s"))]
        cells += [
            _number(next(iter(row.values())).get("floor_us")),
            _number(kernel.get("times_floor")),
        ]
        for name in others:
            us = row.get(name, {}).get("us")
            ratio = us / kernel["us"] if us and kernel.get("us") else None
            cells += [_number(us), _number(ratio)]
        rows.append(cells)
    return f"**{op}**\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _number(value: float | None) -> str:
    """Three digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plot(cases: Cases, path: Path) -> None:
    """Draw every case's times over its floor; the same results, the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "k3jax", "font.size": 8})
    heights = [len(shapes) for shapes in cases.values()]
    figure = Figure(figsize=(7.5, 0.9 + 0.17 * sum(heights) + 0.35 * len(cases)))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(
        len(cases), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    markers = {KERNEL: ("C0", "o"), "triton": ("C2", "s"), "fla": ("C3", "D"), "xla": ("0.6", "x")}
    labelled: dict[str, Any] = {}
    for panel, (op, shapes) in zip(panels, cases.items(), strict=True):
        for place, row in enumerate(shapes.values()):
            for name, (color, marker) in markers.items():
                if {"us", "floor_us"} <= row.get(name, {}).keys():  # else it or the floor failed
                    times = row[name]["us"] / row[name]["floor_us"]
                    labelled[name] = panel.scatter(times, place, s=18, c=color, marker=marker)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_yticks(range(len(shapes)), list(shapes))
        panel.invert_yaxis()
        panel.set_title(op, loc="left", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("time over the floor")
    names = {KERNEL: "kernel", "triton": "Triton kernel", "fla": "flash-linear-attention"}
    figure.legend(
        labelled.values(), [names.get(name, name.upper()) for name in labelled],
        loc="outside lower center", ncols=len(labelled), frameon=False,
    )  # fmt: skip
    figure.savefig(path, format="svg", metadata={"Date": None})


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw all cases")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
