"""Time operators at production shapes: each implementation against its floor and its XLA twin.

The floor of a call is the larger of its bytes over 4.3 TB/s and its operations over 790 TFLOP/s,
both measured on an H200. All implementations of a case run one after the other on the same
arguments, in a process of its own with a time limit; outputs are compared before anything is timed.
A sample is a chain of dependent calls in one program, and the table shows medians.

    python scripts/bench_kernels.py --json kernels.jsonl       every case
    python scripts/bench_kernels.py --only moe_experts/rows1-  cases whose names start so
    JAX_PLATFORMS=cpu python scripts/bench_kernels.py --smoke  tiny shapes, anywhere

The exit status is 1 if a case failed, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

from kernel_bench.case import Case  # noqa: E402
from kernel_bench.cases import all_cases  # noqa: E402
from kernel_bench.measure import measure  # noqa: E402

HEADER = (
    f"{'case':34}{'implementation':16}{'us':>10}{'GB/s':>8}{'TFLOP/s':>9}"
    f"{'floor us':>10}{'x floor':>9}{'x xla':>8}{'error':>10}"
)


def main() -> int:
    args = _parse_args()
    cases = {case.name: case for case in all_cases()}
    if args.case is not None:
        for line in measure(cases[args.case]):
            print(json.dumps(line), flush=True)
        return 0
    chosen = [
        case
        for case in cases.values()
        if case.smoke == args.smoke and case.name.startswith(args.only)
    ]
    if not chosen:
        print(f"--only is wrong: got {args.only!r}; expected the start of one of {list(cases)}")
        return 2
    failed = False
    print(HEADER)
    for case in chosen:
        lines = _run(case)
        failed |= any("failure" in line for line in lines)
        print(_rows(lines), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
    return int(failed)


def _run(case: Case) -> list[dict[str, Any]]:
    """Run a case in a process of its own; a line for what failed or ran out of time."""
    command = [sys.executable, __file__, "--case", case.name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=case.limit_s)
        output, failure = ended.stdout, ended.stderr[-500:] if ended.returncode else ""
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode()
        failure = f"no result within {case.limit_s:.0f} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    done = {line["implementation"] for line in lines}
    for implementation in case.implementations:
        if implementation not in done:
            lines.append(
                {
                    "op": case.op,
                    "shape": case.shape,
                    "implementation": implementation,
                    "failure": failure or "the process ended without a result",
                }
            )
    times = {line["implementation"]: line.get("us") for line in lines}
    for line in lines:
        if line.get("us") and times.get("xla"):
            line["times_xla"] = line["us"] / times["xla"]
    return lines


def _rows(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        start = f"{line['op'] + '/' + line['shape']:34}{line['implementation']:16}"
        if "failure" in line:
            rows.append(f"{start}failed: {line['failure']}")
            continue
        against_xla = f"{line['times_xla']:8.3f}" if "times_xla" in line else f"{'-':>8}"
        rows.append(
            f"{start}{line['us']:10.1f}{line['gb_per_s']:8.0f}{line['tflop_per_s']:9.1f}"
            f"{line['floor_us']:10.1f}{line['times_floor']:9.2f}{against_xla}{line['error']:10.1e}"
        )
    return "\n".join(rows)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="start of the names of the cases to run")
    parser.add_argument("--json", type=Path, help="file to append one JSON line a result to")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
