"""Markdown tables and a plot of the benchmark's JSON lines. Never imports jax."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

_MARKERS = {"dspark": "*", "ngram": "s"}
NEAR = 0.03  # logits that are as far apart, as a share of the largest, may swap in bfloat16


def tables(lines: Sequence[Line]) -> str:
    """All workloads: speed, acceptance by place, equality of greedy answers, failures."""
    parts: list[str] = []
    for name, rows in _by_workload(lines).items():
        parts += [_speed(name, rows), _places(name, rows), *_equality(rows)]
    parts += [f"FAILED {line['case']}: {line['failure']}" for line in lines if "failure" in line]
    return "\n\n".join(parts)


def has_failed(lines: Sequence[Line]) -> bool:
    """Whether a case failed, or a greedy answer is wrong beyond rounding."""
    return not lines or any("failure" in line or _num_far(line) for line in lines)


def speed_ups(line: Line, plain: Line | None) -> tuple[float | None, float | None, float | None]:
    """Against the line without drafts.

    Returns:
      Tokens a second as a multiple; the device time of a step as a multiple; accepted tokens over
      that, which is the speed-up of the device alone.
    """
    if plain is None or "median" not in line:
        return None, None, None
    measured = line["median"] / plain["median"]
    if "device_ms" not in line or "device_ms" not in plain:
        return measured, None, None
    ratio = line["device_ms"] / plain["device_ms"]
    return measured, ratio, line["accepted_per_step"] / ratio


def _by_workload(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        if "median" in line:
            found.setdefault(line["workload"], []).append(line)
    return found


def _plain(rows: Sequence[Line]) -> Line | None:
    return next((row for row in rows if row["drafter"] == "none"), None)


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _speed(name: str, rows: Sequence[Line]) -> str:
    head = ("Drafts", "Accepted a step", "Tokens/s", "Speed-up", "Step, ms", "On the device, ms")
    cells = [[*head, "x without", "Accepted / x"]]
    for row in rows:
        measured, ratio, device = speed_ups(row, _plain(rows))
        cells.append(
            [
                row["variant"],
                _number(row["accepted_per_step"]),
                f"{row['median']:,.0f}",
                _number(measured),
                _number(row["step_ms"]),
                _number(row.get("device_ms")),
                _number(ratio),
                _number(device),
            ]
        )
    return _table(f"{name}: speed", cells)


def _places(name: str, rows: Sequence[Line]) -> str:
    """Acceptance of each draft, and of those whose drafts in front of it stayed."""
    most = max(row["num_drafts"] for row in rows)
    cells = [["Drafts", *(str(place) for place in range(1, 1 + most))]]
    for row in rows:
        if row["num_drafts"]:
            shares = [f"{share:.0%}" for share in _shares(row)]
            cells.append([row["variant"], *shares, *["-"] * (most - len(shares))])
    return _table(f"{name}: drafts that stay, by place", cells)


def _shares(row: Line) -> list[float]:
    pairs = zip(row["taken_by_place"], row["tried_by_place"], strict=True)
    return [taken / tried if tried else 0.0 for taken, tried in pairs]


def _equality(rows: Sequence[Line]) -> list[str]:
    compared = [row for row in rows if row.get("different") is not None and row["num_drafts"]]
    if not compared:
        return []
    shapes = compared[0]["shapes"]
    said: list[str] = []
    for row in compared:
        if row["different"]:
            places = ", ".join(
                f"prompt {one['prompt']} at {one['place']} "
                f"(gap {'not known' if one['gap'] is None else format(one['gap'], '.2%')})"
                for one in row["different"]
            )
            far = _num_far(row)
            said.append(f"{row['variant']}: {len(row['different'])} part, {far} far: {places}")
    text = f"{shapes['prompts']} greedy answers of {shapes['new_tokens']} tokens a variant"
    return [f"{text}: " + ("; ".join(said) or "all equal to those without drafts")]


def _num_far(line: Line) -> int:
    """Answers that part where the logits are not close."""
    different = line.get("different") or ()
    return sum(one["gap"] is None or one["gap"] > NEAR for one in different)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(lines: Sequence[Line], path: Path) -> None:
    """Draw accepted tokens, speed-up and acceptance by place; the same lines, the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "k3jax", "font.size": 9})
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    accepted, speed, places = panels = figure.subplots(1, 3)
    for number, (name, rows) in enumerate(_by_workload(lines).items()):
        color, plain = f"C{number}", _plain(rows)
        fixed = [row for row in rows if row["drafter"] != "ngram" and not row["draft_cost"]]
        if not fixed:
            continue
        counts = [row["num_drafts"] for row in fixed]
        ups = [speed_ups(row, plain) for row in fixed]
        tokens = [row["accepted_per_step"] for row in fixed]
        accepted.plot(counts, tokens, "o-", color=color, label=name)
        speed.plot(counts, [measured for measured, *_ in ups], "o-", color=color)
        speed.plot(counts, [device for *_, device in ups], "--", color=color)
        for row in rows:
            if row not in fixed:
                style = {"marker": _MARKERS[row["drafter"]], "color": color, "mfc": "none"}
                accepted.plot(row["num_drafts"], row["accepted_per_step"], **style)
                speed.plot(row["num_drafts"], speed_ups(row, plain)[0], **style)
        shares = _shares(max(fixed, key=lambda row: row["num_drafts"]))
        places.plot(range(1, 1 + len(shares)), [100 * one for one in shares], "o-", color=color)
    most = max(line["num_drafts"] for line in lines)
    accepted.plot([0, most], [1, 1 + most], ":", color="0.5", label="if all stayed")
    speed.axhline(1, color="0.5", linestyle=":")
    # Of the styles, whatever the color.
    speed.plot([], [], "--", color="0.5", label="accepted tokens over the device's time")
    for drafter, label in (("dspark", "adaptive"), ("ngram", "n-gram")):
        speed.plot([], [], _MARKERS[drafter], color="0.5", mfc="none", label=label)
    labels = (
        ("drafts", "accepted tokens of a step"),
        ("drafts", "speed-up"),
        ("place of the draft", "drafts that stay, %"),
    )
    for panel, (x, y) in zip(panels, labels, strict=True):
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
