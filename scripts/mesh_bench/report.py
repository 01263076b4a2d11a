"""Results of the mesh benchmarks: one JSON line a case, and tables. Never imports jax."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mesh_bench.groups import LAYOUTS, Group

Line = dict[str, Any]
_LAYERS: Mapping[str, str] = {"layer/kda": "K", "layer/mla": "M"}
_OF_SAMPLES = {"samples", "p10", "p90", "operations", "greedy_ids"}
_SIZES = {"tokens": "T", "tokens_per_rank": "T/rank", "rows": "rows", "bytes": "bytes"}
_PERCENTILES = {"median": 50, "p10": 10, "p90": 90}


def complete(group: Group, lines: Iterable[Mapping[str, Any]], commit: str) -> list[Line]:
    """The lines of a group with medians, the cost of the call taken off, and circumstances."""
    known: Line = {"commit": commit, "group": group.name} | {
        "section": group.section, "layout": group.layout, "ranks": group.ranks,
    }  # fmt: skip
    found: list[Line] = []
    for line in lines:
        if "circumstances" in line:
            known |= line["circumstances"]
        elif "case" in line:
            found.append(dict(line))
    for line in found:
        if "samples" in line:
            for name, percentile in _PERCENTILES.items():
                line[name] = float(np.percentile(line["samples"], percentile))
    call_us = [
        line["median"] * line["operations"]
        for line in found
        if line["case"] == "call" and "median" in line
    ]
    for line in found:
        if call_us and line.get("unit") == "us":
            line["net"] = line["median"] - call_us[0] / line["operations"]
        line |= known
    return found


def layer_times(results: Sequence[Line]) -> list[Line]:
    """Time of one more layer in a decode step: differences between truncations."""
    derived: list[Line] = []
    steps = {
        (line["layout"], line["case"], _size(line["shapes"])): line
        for line in results
        if "median" in line and line["case"].startswith("decode/")
    }
    for (layout, case, size), base in steps.items():
        kind, layers, form = case.split("/")
        for name, layer in _LAYERS.items():
            longer = steps.get((layout, f"{kind}/{layers}{layer}/{form}", size))
            if longer is not None:
                line = {key: base[key] for key in base if key not in _OF_SAMPLES}
                line["shapes"] = base["shapes"] | {"layers": f"{layers}{layer} - {layers}"}
                derived.append(line | {"case": name, "median": longer["median"] - base["median"]})
    return derived


def same_ids(results: Sequence[Line]) -> list[str]:
    """How many greedy ids each step shares with the first step like it.

    That is the one of a device alone if there is one; in decode of the same mesh, since the random
    cache means other numbers to another.
    """
    texts: list[str] = []
    first: dict[tuple[str, str], tuple[str, list[int]]] = {}
    steps = [line for line in results if "greedy_ids" in line]
    for line in sorted(steps, key=lambda line: line["layout"] != "one_gpu"):
        kind, layers, form = line["case"].split("/")
        mesh = f"/tp{line['shapes']['tp']}" if kind == "decode" else ""
        key = (f"{kind}/{layers}{mesh}", _size(line["shapes"]))
        name = f"{line['layout']}/{form}"
        other, ids = first.setdefault(key, (name, line["greedy_ids"]))
        if other != name:
            equal = sum(a == b for a, b in zip(ids, line["greedy_ids"], strict=True))
            texts.append(f"{'/'.join(key)}: {name} as {other}: {equal} of {len(ids)}")
    return texts


def table(results: Sequence[Line]) -> str:
    """All cases as text, the layouts side by side; `net` is without the call's share."""
    rows = _rows(results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def markdown(results: Sequence[Line]) -> str:
    """The circumstances, a table for each section, the greedy ids, and what failed."""
    parts: list[str] = []
    for line in results[:1]:
        device = line.get("device", {})
        versions = " ".join(f"{name} {text}" for name, text in line.get("versions", {}).items())
        parts.append(f"{device.get('count', '?')} x {device.get('kind', '?')}, {versions}")
        parts.append(f"Commit {line['commit']}. Medians; `net` is without the share of the call.")
    for section in dict.fromkeys(line["section"] for line in results):
        head, *rows = _rows([line for line in results if line["section"] == section])
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        parts.append("\n".join([f"## {section}", "", *lines]))
    failed = failures(results)
    for title, texts in (("Greedy ids", same_ids(results)), (f"Failed: {len(failed)}", failed)):
        parts.append("\n".join([f"## {title}", "", *(f"- {text}" for text in texts or ["none"])]))
    return "\n\n".join(parts) + "\n"


def series(results: Sequence[Line]) -> dict[tuple[str, str], dict[str, list[tuple[int, float]]]]:
    """Times by size of each case and layout, for each section and unit; `net` where it is known."""
    found: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for line in results:
        sizes = [line["shapes"][name] for name in _SIZES if name in line["shapes"]]
        if sizes and "median" in line:
            panel = found.setdefault((line["section"], line["unit"]), {})
            points = panel.setdefault(f"{line['case']}, {line['layout']}", [])
            points.append((sizes[0], line.get("net", line["median"])))
    return found


def _rows(results: Sequence[Line]) -> list[list[str]]:
    """A head and a row for each case; columns for each layout that has results."""
    layouts = [layout for layout in LAYOUTS if any(line["layout"] == layout for line in results)]
    rows = [["case", "size", "unit"]]
    for layout in layouts:
        rows[0] += [layout, "p10", "p90", "net"]
    by_case: dict[tuple[str, str], dict[str, Line]] = {}
    for line in results:
        if line["case"] != "group":
            by_case.setdefault((line["case"], _size(line["shapes"])), {})[line["layout"]] = line
    for (case, size), lines in by_case.items():
        units = {line["unit"] for line in lines.values() if "unit" in line}
        row = [case, size, *(units or {"-"})]
        for layout in layouts:
            line = lines.get(layout, {})
            mark = "" if line.get("collectives_as_written", True) else "!"
            row += [f"{_number(line, 'median')}{mark}"]
            row += [_number(line, name) for name in ("p10", "p90", "net")]
        rows.append(row)
    return rows


def failures(results: Sequence[Line]) -> list[str]:
    """One text for each case and group that failed."""
    return [
        f"{line['group']} {line['case']} {_size(line['shapes'])}: {line['failure']}"
        for line in results
        if "failure" in line
    ]


def checkout(folder: Path) -> str:
    """Commit of the checkout; `+` marks changes to it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _size(shapes: Mapping[str, Any]) -> str:
    """The count that tells cases of one name apart."""
    return " ".join(f"{text} {shapes[name]}" for name, text in _SIZES.items() if name in shapes)


def _number(line: Mapping[str, Any], name: str) -> str:
    if "failure" in line and name == "median":
        return "FAILED"
    return f"{line[name]:.4g}" if name in line else "-"
