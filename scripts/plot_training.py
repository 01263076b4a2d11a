"""Draw the loss curves of `scripts/train_embedded.py`, and how often its drafts are taken.

    python scripts/plot_training.py k3jax/weights/embedded_model/training.json training.svg

Needs matplotlib. The same record makes the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, metavar="training.json")
    parser.add_argument("plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    plot(json.loads(args.record.read_bytes()), args.plot)
    return 0


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Write three panels: the model's loss, the draft's, and the drafts that are taken."""
    mpl.rcParams.update({"svg.hashsalt": "k3jax", "font.size": 8})
    figure = Figure(figsize=(8.4, 2.4), layout="constrained")
    model, draft, taken = figure.subplots(1, 3)
    for panel, name in ((model, "model"), (draft, "draft")):
        curve = record["curves"][name]
        panel.plot([point["step"] for point in curve], [point["loss"] for point in curve])
        panel.set_xlabel(f"step, {name}")
    model.axhline(record["held_out_nats"], color="black", linestyle="dashed", linewidth=0.8)
    model.set_yscale("log")
    model.set_yticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
    model.yaxis.set_minor_formatter("")
    model.set_ylabel("nats a byte; dashed: held out")
    draft.set_ylabel("loss")
    shares = record["draft_taken_by_place"]
    taken.bar(range(1, len(shares) + 1), [100 * share for share in shares])
    taken.set_xlabel("place in the block")
    taken.set_ylabel("chance to be taken, %")
    for panel in (model, draft, taken):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
