"""Load a running server at given rates; measure what its clients wait for.

    python scripts/bench_serve.py --rates 1 2 4 8 --json serve.jsonl --plot serve.svg

The load is open: requests arrive as a Poisson process, whether earlier ones have been answered or
not, and times count from the moment a request was due. Printed for each rate, in milliseconds:
TTFT, from there to the first token; TPOT, the mean time of a token behind it. Goodput is the number
of answers a second that kept to `--goal`. Prompts are random token ids; the first
`--shared-tokens` are the same in all, so that a server with a prefix cache can reuse them.

`--json` appends a line a rate; `--report FILE` shows such a file instead of measuring. The exit
status is 1 if a request ended with another status than OK, its own cancellation, or
RESOURCE_EXHAUSTED, which a loaded server may say; and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import sys
from pathlib import Path
from typing import Any

import grpc

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

from mesh_bench.report import checkout  # noqa: E402
from serve_bench import load, report  # noqa: E402

from serving.option_types import number  # noqa: E402
from serving.rpc.protocol import Stub, messages  # noqa: E402

_EXPECTED = {"OK", "CANCELLED", "RESOURCE_EXHAUSTED"}


def main(argv: list[str] | None = None) -> int:
    args = _parse_args(argv)
    if args.report is not None:
        lines = [json.loads(text) for text in args.report.read_text().splitlines()]
        print(report.HEADER)
        print("\n".join(map(report.row, lines)))
    else:
        try:
            lines = _measure(args)
        except grpc.RpcError as error:
            print(f"bench_serve.py: {args.address}: {error.details()}", file=sys.stderr)  # pyright: ignore
            return 1
    if args.plot is not None:
        report.plot(lines, args.plot)
    return int(any(set(line["statuses"]) - _EXPECTED for line in lines))


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    circumstances = _circumstances(args)
    workload = load.Workload(
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        shared_tokens=args.shared_tokens,
        cancel_share=args.cancel_share,
        seed=args.seed,
    )
    circumstances["workload"] = dataclasses.asdict(workload)
    goal = report.Goal(first_token_s=args.goal[0] / 1000, token_s=args.goal[1] / 1000)
    asyncio.run(load.run(args.address, list(load.arrivals(workload, 2.0, 2.0)), "warm"))
    print(report.HEADER)
    lines = []
    for rate in args.rates:
        arrivals = list(load.arrivals(workload, rate, args.duration))
        samples = asyncio.run(load.run(args.address, arrivals, f"{args.seed}-{rate:g}"))
        line = report.summary(rate, samples, goal)
        lines.append(line | circumstances)
        print(report.row(line), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    return lines


def _circumstances(args: argparse.Namespace) -> dict[str, Any]:
    with grpc.insecure_channel(args.address) as channel:
        info = Stub(channel).GetModelInfo(messages.GetModelInfoRequest(), timeout=10)
    return {
        "model": info.served_model_name,
        "duration_s": args.duration,
        "machine": platform.machine(),
        "commit": checkout(CHECKOUT),
    }


def _span(text: str) -> tuple[int, int]:
    """Parse `64` or `64:512`."""
    low, _, high = text.partition(":")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected numbers such as 64 or 64:512")
    return span


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--address", default="127.0.0.1:50051", help="of the server (default: %(default)s)")
    add(
        "--rates", type=number(float, at_least=0.01), nargs="+", default=[1.0, 2.0, 4.0],
        metavar="R", help="requests a second, one after the other (default: 1 2 4)",
    )  # fmt: skip
    add(
        "--duration", type=number(float, at_least=1), default=30.0, metavar="S",
        help="seconds in which requests arrive, for each rate (default: %(default)g)",
    )  # fmt: skip
    add(
        "--prompt-tokens", type=_span, default=(16, 128), metavar="N[:M]",
        help="of a request, drawn evenly (default: 16:128)",
    )  # fmt: skip
    add("--new-tokens", type=_span, default=(16, 64), metavar="N[:M]", help="(default: 16:64)")
    add("--shared-tokens", type=number(int, at_least=0), default=0, metavar="N",
        help="that all prompts begin with (default: 0)")  # fmt: skip
    add("--cancel-share", type=number(float, at_least=0, at_most=1), default=0.0, metavar="P",
        help="of the requests whose client leaves half-way (default: 0)")  # fmt: skip
    add(
        "--goal", type=number(float, at_least=0), nargs=2, default=(1000.0, 100.0),
        metavar=("TTFT", "TPOT"), help="milliseconds of a good answer (default: 1000 100)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of the load (default: 0)")
    add("--json", type=Path, metavar="FILE", help="append one line a rate")
    add("--report", type=Path, metavar="FILE", help="show such a file instead")
    add("--plot", type=Path, metavar="FILE.svg", help="draw it; needs matplotlib")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
