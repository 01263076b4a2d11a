"""What the commands of the mesh benchmarks share: options, and running all groups in time."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mesh_bench import launch, report
from mesh_bench.groups import LAYOUTS, Group

_LEAST_S = 5.0  # a group with less time than that is not started


def add_options(parser: argparse.ArgumentParser, *, total_s: float) -> None:
    """Options of all mesh benchmarks."""
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line a case")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the processes' logs here")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep compiled programs here")
    parser.add_argument("--commit", help="to record where this is no checkout")
    parser.add_argument(
        "--total-s", type=float, default=total_s, help="of the whole run (default: %(default)g)"
    )
    parser.add_argument(
        "--limit-factor", type=float, default=1.0, help="of the groups' time limits (default: 1)"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the benchmark out")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line; an environment that may turn multicast on is an error of it."""
    args = parser.parse_args()
    try:
        launch.check_flags(os.environ)
    except launch.ForbiddenFlag as error:
        parser.error(str(error))
    return args


def run(groups: Sequence[Group], args: argparse.Namespace, *, sizes: str) -> list[report.Line]:
    """Run all groups, one after the other, and return what they measured and what follows from it.

    Args:
      sizes: a name of `groups.SIZES`, unless `--smoke` takes the tiny ones.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes
    deadline = time.monotonic() + args.total_s
    commit = args.commit or report.checkout(Path(__file__).parent)
    results: list[report.Line] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for group in groups:
            limit_s = min(group.limit_s * args.limit_factor, deadline - time.monotonic())
            start = time.monotonic()
            if limit_s < _LEAST_S:
                lines = [launch.failed("not started: the time of the whole run is over")]
            else:
                lines = launch.run_group(
                    group, folder, args.cache or Path(temporary, "cache"),
                    sizes="smoke" if args.smoke else sizes, limit_s=limit_s,
                )  # fmt: skip
            found = report.complete(group, lines, commit)
            print(
                f"{group.name}: {len(found)} lines, {time.monotonic() - start:.0f} s of at most "
                f"{max(limit_s, 0):.0f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            results += found
            _append(args.json, found)
    layers = report.layer_times(results)
    _append(args.json, layers)
    return [*results, *layers]


def _append(path: Path | None, lines: Sequence[report.Line]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
