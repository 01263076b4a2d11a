"""Replay scripted cache traces on the page table and scheduler, and on a model of the pages.

Prints one JSON object a file: how many answers differ from the recorded ones, how many reads of
wrong bytes the content model sees, and the first problem. With `--generate` it runs random
workloads, whose only answers are the content model's, and prints one summary. Exit status: 0 if all
counts are zero, 1 if one is not, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from serving.replay import (
    RECORDED,
    SERVED,
    Report,
    is_index,
    parse_trace,
    replay,
    run_workloads,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json", help="traces")
    parser.add_argument("--generate", type=int, metavar="N", help="run N random workloads")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload (default: 0)")
    parser.add_argument(
        "--served",
        action="store_true",
        help="random workloads with the server's policies where the trace format names none",
    )
    args = parser.parse_args()
    if not args.files and args.generate is None:
        parser.error("nothing to do: got no file and no --generate; expected one of them")
    if args.generate is not None and args.generate < 1:
        parser.error(f"--generate is out of range: got {args.generate}; expected >= 1")
    is_clean = True
    try:
        for path in args.files:
            is_clean &= _replay_file(path)
    except (ValueError, OSError) as error:
        print(f"replay_cache.py: {path}: {error}", file=sys.stderr)
        return 2
    if args.generate is not None:
        summary = run_workloads(args.generate, args.seed, SERVED if args.served else RECORDED)
        print(json.dumps(dataclasses.asdict(summary)))
        is_clean &= summary.is_clean
    return 0 if is_clean else 1


def _replay_file(path: Path) -> bool:
    """Replay one file and print its line; returns whether nothing is wrong."""
    data = json.loads(path.read_text())
    if is_index(data):
        print(f"replay_cache.py: {path}: skipped, a list of traces", file=sys.stderr)
        return True
    report: Report = replay(parse_trace(data))
    num_mismatches = len(report.mismatches) + (report.error is not None)
    line = {
        "file": str(path),
        "mismatches": num_mismatches,
        "violations": len(report.violations),
        "first": report.first,
    }
    print(json.dumps(line), flush=True)
    return not (num_mismatches or report.violations)


if __name__ == "__main__":
    sys.exit(main())
