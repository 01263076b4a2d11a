"""Count the prompt tokens that the server computes, with and without reuse of prefixes.

The real server runs once a configuration, with the embedded model in float32 on a CPU, and gets the
same conversations over gRPC, one request at a time and several at once:

    off             --prefix-cache off
    whole pages     --hash-block-size PAGE --answer-end-state off
    inside pages    --answer-end-state off
    answers too     the server's defaults

Pages have 768 tokens, as those of Kimi K3 on tp8. What is counted is a property of the cache: it
does not depend on the model's weights or the machine, but with several clients it depends a little
on which requests meet. `new` is the share of prompt tokens that no cache could have had.

All answers are greedy and must be those of the server without reuse; the exit status is 1 if one
is not. It is 2 for wrong arguments and if a server does not start. Seconds are for information. A
first run compiles, which takes a few minutes; see `--cache-dir`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from host_bench.report import circumstances
from reuse_bench import report
from reuse_bench.report import Case
from reuse_bench.server import Answer, ServerFailed, ask, flush, running_server
from reuse_bench.workloads import WORKLOADS, Turn, Workload, new_tokens

from serving.option_types import number
from serving.rpc.protocol import Stub

_CONTEXT_TOKENS = 2304
_NUM_PAGES = 48  # what a workload comes back to is never evicted


class Reply(NamedTuple):
    """A request as it was sent, and its answer."""

    prompt: tuple[int, ...]
    answer: Answer


def main() -> int:
    args = _parse_args()
    if args.plot and not report.can_plot():
        print(
            "bench_reuse.py: --plot needs matplotlib, which is not installed; "
            "install it, or all of '.[bench]'",
            file=sys.stderr,
        )
        return 2
    workloads = [WORKLOADS[name](args.seed) for name in args.workloads]
    try:
        cases = list(_measure(args, workloads))
        known = _circumstances(args)
        if args.json:
            lines = (json.dumps(case.to_json() | known) for case in cases)
            args.json.write_text("".join(f"{line}\n" for line in lines))
        if args.plot:
            report.plot(cases, args.plot)
    except (ServerFailed, OSError) as error:
        print(f"bench_reuse.py: {error}", file=sys.stderr)
        return 2
    print(report.table(cases))
    num_different = sum(case.num_different for case in cases)
    if num_different:
        print(f"bench_reuse.py: {num_different} answers depend on reuse", file=sys.stderr)
    return int(num_different > 0)


def _configurations(page_tokens: int) -> Mapping[str, tuple[str, ...]]:
    no_answers = ("--answer-end-state", "off")
    return {
        "off": ("--prefix-cache", "off"),
        "whole pages": ("--hash-block-size", str(page_tokens), *no_answers),
        "inside pages": no_answers,
        "answers too": (),
    }


def _measure(args: argparse.Namespace, workloads: Sequence[Workload]) -> Iterator[Case]:
    """Run all cases; those without reuse come first, and give the expected answers."""
    expected: dict[str, Sequence[Reply]] = {}
    for name, own in _configurations(args.page_tokens).items():
        options = (*_common_options(args), *own)
        _say(f"{name}: starting the server")
        with running_server(*options) as stub:
            for workload, clients in itertools.product(workloads, args.clients):
                flush(stub)
                begin_s = time.monotonic()
                replies = play(stub, workload, clients)
                seconds = time.monotonic() - begin_s
                _say(f"{name}: {workload.name}, {clients} at a time: {seconds:.1f} s")
                wanted = expected.setdefault(workload.name, replies)
                yield Case(
                    workload=workload.name,
                    configuration=name,
                    options=options,
                    clients=clients,
                    num_requests=len(replies),
                    prompt_tokens=sum(reply.answer.prompt_tokens for reply in replies),
                    cached_tokens=sum(reply.answer.cached_tokens for reply in replies),
                    new_tokens=new_tokens((r.prompt, r.answer.token_ids) for r in replies),
                    num_different=sum(
                        got.answer.token_ids != want.answer.token_ids
                        for got, want in zip(replies, wanted, strict=True)
                    ),
                    seconds=seconds,
                )


def _common_options(args: argparse.Namespace) -> tuple[str, ...]:
    page_tokens = str(args.page_tokens)
    cache = ("--cache-dir", str(args.cache_dir)) if args.cache_dir else ()
    return (
        *("--dtype", "float32", "--page-unit", page_tokens, "--max-prefill-tokens", page_tokens),
        *("--max-context", str(_CONTEXT_TOKENS), "--num-pages", str(_NUM_PAGES)),
        *("--max-rows", str(max(args.clients)), *cache),
    )


def play(stub: Stub, workload: Workload, clients: int) -> list[Reply]:
    """Send all requests, `clients` at a time, the dialogues taking turns."""
    histories: list[tuple[int, ...]] = [()] * len(workload.dialogues)
    replies: list[Reply] = []
    with ThreadPoolExecutor(clients) as pool:
        for turns in zip(*workload.dialogues, strict=True):
            replies += pool.map(lambda turn, history: _send(stub, turn, history), turns, histories)
            latest = replies[-len(turns) :]
            histories = [reply.prompt + reply.answer.token_ids for reply in latest]
    return replies


def _send(stub: Stub, turn: Turn, history: tuple[int, ...]) -> Reply:
    prompt = history[: turn.kept] + turn.tokens
    return Reply(prompt, ask(stub, prompt, turn.answer_tokens))


def _circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """Commit, machine and versions, the same for every line of a run."""
    known = circumstances("wall", None)
    return {
        "commit": known["commit"],
        "device": known["device"],
        "versions": report.versions(),
        "page_tokens": args.page_tokens,
        "seed": args.seed,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all"
    )
    parser.add_argument(
        "--clients",
        type=number(int, at_least=1),
        nargs="+",
        default=[1, 3],
        metavar="N",
        help="requests sent at once (default: 1 3)",
    )
    parser.add_argument(
        "--page-tokens",
        type=number(int, at_least=128),
        default=768,
        metavar="N",
        help="of a page, a multiple of 128 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="for compiled steps (default: the server's)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON line a case")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw the shares; needs matplotlib"
    )
    args = parser.parse_args()
    if args.page_tokens % 128:
        parser.error(f"--page-tokens: got {args.page_tokens}; expected a multiple of 128")
    return args


if __name__ == "__main__":
    sys.exit(main())
