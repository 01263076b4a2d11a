"""Time the host's part of a step: cache calls, planning, packing, prefix keys.

The page table is compared with vLLM's own `KVCacheManager`, which gets the same calls on the same
traces; the two take turns, so that a noisy machine disturbs both alike. A comparison counts only
if both give the same answers: hits, junctions, and whether there was room.

vLLM's compiled parts are not used, and neither is a GPU. vLLM may be in this environment
(`pip install -e '.[bench]'`, which resolves together with JAX for CPUs), or in one of its own,
which keeps its many dependencies apart:

    python3 -m venv vllm && vllm/bin/pip install vllm==0.33.0
    .venv/bin/python scripts/bench_host.py --vllm-python vllm/bin/python --json host.jsonl

It runs in a process of its own either way, and without it the other cases still run. A few packages
are enough for what is used of it:

    vllm/bin/pip install --no-deps vllm==0.33.0 && vllm/bin/pip install torch==2.14.0 numpy \
        'transformers<5.21' 'fastapi[standard]<0.137' xgrammar==0.2.8 'llguidance<1.8' openai \
        openai-harmony prometheus_client py-cpuinfo partial-json-parser cachetools cbor2 \
        cloudpickle msgspec pillow psutil pybase64 pyzmq aiohttp requests uvloop

`--json FILE` writes one line a case: samples, medians, the bound that our median is compared with,
commit, machine, versions. Where other programs share the cores, `--clock cpu` leaves out what they
take. The exit status does not depend on bounds: it is 1 if the engines do not answer alike, and 2
for wrong arguments, a baseline that does not start included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

from host_bench import cases, report, steps
from host_bench.baseline import Baseline, BaselineError
from host_bench.clock import CLOCKS

_FAMILIES = ("golden", "random", "lookup", "hash", "step")
_TRACES = Path(__file__).parents[1] / "tests" / "data" / "cache"


def main() -> int:
    args = _parse_args()
    try:
        with contextlib.ExitStack() as stack:
            python = args.vllm_python
            baseline = stack.enter_context(Baseline(python, args.clock)) if python else None
            if baseline is None:
                print("no vLLM here: its columns stay empty; see --vllm-python", file=sys.stderr)
            results = _measure(args, baseline)
        known = report.circumstances(args.clock, baseline.versions if baseline else None)
        if args.json:
            lines = (json.dumps(result.to_json() | known) for result in results)
            args.json.write_text("".join(f"{line}\n" for line in lines))
    except cases.DifferentAnswers as error:
        print(f"bench_host.py: {error}", file=sys.stderr)
        return 1
    except (BaselineError, ValueError, OSError) as error:
        print(f"bench_host.py: {error}", file=sys.stderr)
        return 2
    print(report.table(results))
    return 0


def _measure(args: argparse.Namespace, baseline: Baseline | None) -> list[report.Result]:
    bench = cases.Bench(args.repeats, baseline, CLOCKS[args.clock])
    results: list[report.Result] = []
    for family in args.cases:
        match family:
            case "golden":
                results += cases.golden(args.traces, bench)
            case "random":
                results += cases.random_traces(args.seed, bench)
            case "lookup":
                results += cases.long_lookup(args.tokens, bench)
            case "hash":
                results += cases.hashing(args.tokens, 128, bench)
            case _:
                results += [
                    steps.decoding(rows, args.steps, args.seed, bench.now) for rows in args.rows
                ]
    return results


def _parse_args() -> argparse.Namespace:
    has_vllm = importlib.util.find_spec("vllm") is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=_FAMILIES, default=_FAMILIES, help="default: all"
    )
    parser.add_argument(
        "--vllm-python",
        metavar="PATH",
        default=sys.executable if has_vllm else None,
        help="interpreter that has vLLM 0.33.0 (default: this one, if it has)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON line a case")
    parser.add_argument("--traces", type=Path, default=_TRACES, help="folder of recorded traces")
    parser.add_argument("--repeats", type=_positive, default=9, help="of a case (default: 9)")
    parser.add_argument("--seed", type=int, default=0, help="of random traces (default: 0)")
    parser.add_argument(
        "--tokens", type=_positive, default=1_000_000, help="of the long prompt (default: 1000000)"
    )
    parser.add_argument(
        "--rows",
        type=_positive,
        nargs="+",
        default=(1, 64, 256),
        help="of steps (default: 1 64 256)",
    )
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu leaves out what other programs take (default: wall)",
    )
    parser.add_argument("--steps", type=_positive, default=300, help="timed (default: 300)")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; expected >= 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
