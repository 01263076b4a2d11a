"""Time meshes of two GPUs: MoE tails, expert dispatch, and steps of a truncated K3.

Sections:

* `tails`: the three forms of the MoE tail at K3's sizes, and bare collectives of the same sizes.
* `dispatch`: the forms of the exchange between two ranks of experts, with experts that return their
  input, and with real MXFP4 experts.
* `steps`: decode and prefill of a few layers of K3 with random weights, through the server's step
  programs: rows, tail forms, prefill with and without sharded tokens. One layer's time is the
  difference of two truncations.

Layouts: one process that drives both GPUs (`one_process`), one process a GPU (`process_per_gpu`),
and for steps one GPU alone (`one_gpu`).

Cases of `tails` and `dispatch` are chains of dependent operations in one program, checked against a
float32 computation before they are timed. A sample is one call divided by its operations; `net`
takes off what a call costs with nothing in it. `!` marks programs whose collectives are not those
that were written (some were replaced). Each section and layout runs in processes of its own with a
time limit. What fails or runs out of time is listed, and the rest still runs:

    python scripts/bench_mesh.py --json mesh.jsonl          on two GPUs, at most 8.5 minutes
    JAX_PLATFORMS=cpu python scripts/bench_mesh.py --smoke  tiny sizes on two simulated devices

NVLink multicast stays off in all processes. The exit status is 1 if anything failed, and 2 for
wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from mesh_bench import launch, report
from mesh_bench.groups import LAYOUTS, SECTIONS, groups


def main() -> int:
    args = _parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes
    deadline = time.monotonic() + args.total_s
    commit = args.commit or report.checkout(Path(__file__).parent)
    results: list[report.Line] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for group in groups(args.sections, args.layouts):
            limit_s = min(group.limit_s * args.limit_factor, deadline - time.monotonic())
            lines = launch.run_group(
                group, folder, args.cache or Path(temporary, "cache"),
                smoke=args.smoke, limit_s=limit_s,
            )  # fmt: skip
            found = report.complete(group, lines, commit)
            results += found
            print(
                f"{group.section} {group.layout}: {len(found)} lines, "
                f"{lines[-1]['seconds']:.0f} s of at most {limit_s:.0f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if args.json:
                with args.json.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in found)
    layers = report.layer_times(results)
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in layers)
    failed = report.failures(results)
    print(report.table([*results, *layers]))
    print("\n".join(["", "greedy ids:", *report.same_ids(results)]))
    print("\n".join(["", f"failed: {len(failed)}", *failed]))
    return 1 if failed else 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line a case")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the processes' logs here")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep compiled programs here")
    parser.add_argument("--commit", help="to record where this is no checkout")
    parser.add_argument(
        "--total-s", type=float, default=510.0, help="of the whole run (default: 510)"
    )
    parser.add_argument(
        "--limit-factor", type=float, default=1.0, help="of the groups' time limits (default: 1)"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the benchmark out")
    args = parser.parse_args()
    try:
        launch.check_flags(os.environ)
    except launch.ForbiddenFlag as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    sys.exit(main())
