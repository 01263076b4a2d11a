"""Time operators at production shapes: each implementation against its floor and its XLA twin.

The floor of a call is the larger of its bytes over 4.3 TB/s and its operations over 790 TFLOP/s,
both measured on an H200. All implementations of a case run one after the other on the same
arguments, in a process of its own with a time limit; outputs are compared before anything is timed.
A sample is a chain of dependent calls in one program, and the table shows medians; `busy` is how
long some operation of such a chain ran by a trace, which leaves out the launches between them.
Other projects' kernels follow in processes of their own, where they are installed.

    python scripts/bench_kernels.py --json kernels.jsonl       every case
    python scripts/bench_kernels.py --only moe_experts/rows1-  cases whose names start so
    JAX_PLATFORMS=cpu python scripts/bench_kernels.py --smoke  tiny shapes, anywhere

The exit status is 1 if a case failed, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

import jax  # noqa: E402
from kernel_bench.case import Case  # noqa: E402
from kernel_bench.cases import all_cases  # noqa: E402
from kernel_bench.measure import measure, measure_peer  # noqa: E402

HEADER = (
    f"{'case':34}{'implementation':16}{'us':>10}{'busy us':>10}{'GB/s':>8}{'TFLOP/s':>9}"
    f"{'floor us':>10}{'x floor':>9}{'x xla':>8}{'error':>10}"
)
COLUMNS = (  # of a line: name, format, width
    ("us", ".1f", 10),
    ("busy_us", ".1f", 10),
    ("gb_per_s", ".0f", 8),
    ("tflop_per_s", ".1f", 9),
    ("floor_us", ".1f", 10),
    ("times_floor", ".2f", 9),
    ("times_xla", ".3f", 8),
    ("error", ".1e", 10),
)


def main() -> int:
    args = _parse_args()
    cases = {case.name: case for case in all_cases()}
    if args.case is not None:
        case = cases[args.case]
        jax.devices()
        with _locked(args.lock):
            for line in measure(case) if args.peer is None else [measure_peer(case, args.peer)]:
                print(json.dumps(line), flush=True)
        return 0
    chosen = [
        case
        for start in args.only
        for case in cases.values()
        if case.smoke == args.smoke and case.name.startswith(start)
    ]
    if not chosen:
        print(f"--only is wrong: got {args.only!r}; expected the start of one of {list(cases)}")
        return 2
    failed = False
    print(HEADER)
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(args.jobs) as pool:
        for lines in pool.map(lambda case: _run(case, args.jobs, "--lock", lock.name), chosen):
            failed |= any("failure" in line for line in lines)
            print(_rows(lines), flush=True)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
    return int(failed)


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Have the device alone among the processes of a run."""
    if path is None:
        yield
        return
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(case: Case, jobs: int, *options: str) -> list[dict[str, Any]]:
    """Run a case and its peers; a line for what failed or ran out of time.

    Args:
      jobs: processes that may wait for each other, each for as long as a case may take.
    """
    limit_s = case.limit_s * jobs
    lines = _process(case, case.implementations, limit_s, *options)
    floor_us = next((line["floor_us"] for line in lines if "floor_us" in line), None)
    for peer in case.peers:
        lines += _process(case, (peer,), limit_s, *options, "--peer", peer)
        if "us" in lines[-1] and floor_us is not None:
            lines[-1] |= {"floor_us": floor_us, "times_floor": lines[-1]["us"] / floor_us}
    times = {line["implementation"]: line.get("us") for line in lines}
    for line in lines:
        if line.get("us") and times.get("xla"):
            line["times_xla"] = line["us"] / times["xla"]
    return lines


def _process(
    case: Case, expected: tuple[str, ...], limit_s: float, *options: str
) -> list[dict[str, Any]]:
    """Run implementations of a case in a process of its own; one line for each."""
    command = [sys.executable, __file__, "--case", case.name, *options]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        output, failure = ended.stdout, ended.stderr[-500:] if ended.returncode else ""
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode()
        failure = f"no result within {limit_s:.0f} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    done = {line["implementation"] for line in lines}
    for implementation in expected:
        if implementation not in done:
            lines.append(
                {
                    "op": case.op,
                    "shape": case.shape,
                    "implementation": implementation,
                    "failure": failure or "the process ended without a result",
                }
            )
    return lines


def _rows(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        start = f"{line['op'] + '/' + line['shape']:34}{line['implementation']:16}"
        for reason in ("failure", "skipped"):
            if reason in line:
                rows.append(f"{start}{'failed' if reason == 'failure' else reason}: {line[reason]}")
        if "us" in line:
            numbers = [
                f"{format(line[name], form) if name in line else '-':>{width}}"
                for name, form, width in COLUMNS
            ]
            rows.append(start + "".join(numbers))
    return "\n".join(rows)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="starts of the names of the cases to run, in this order",
    )
    parser.add_argument("--json", type=Path, help="file to append one JSON line a result to")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that start ahead; one at a time is at work"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
