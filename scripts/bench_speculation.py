"""Measure speculative decoding on one device: accepted tokens, and tokens a second, by drafts.

    python scripts/bench_speculation.py --json spec.jsonl
    python scripts/bench_speculation.py --report spec.jsonl --plot spec.svg      needs matplotlib

The server's engine answers prompts one after the other, without drafts, with 1 to 7 drafts of the
draft model in every step, with as many as the controller chooses, and with drafts of n-grams. Each
way has compiled steps of its own; all take turns in one process, so a disturbance meets them alike.

* Low-entropy prompts are Python that can hardly go on but one way, answered greedily. The answers
  have to be those without drafts; where they part, `gap` is how far the logits of the two tokens
  are apart, as a share of the largest logit. With bfloat16 near ties part.
* High-entropy prompts are varied text and random names, answered with a temperature of 1.

What is printed of decoding, that is from an answer's first token on:

* accepted tokens of a step: the drafts that stay and the token that the model writes behind them,
  so 1 without drafts; mean of all steps, and what an answer's end cuts off counts;
* acceptance by place: the share of the steps with a draft at that place in which it stayed;
* tokens a second, as the client of the engine gets them, and the median time of a step there;
* the time of a full step on the device alone. Its ratio to that without drafts is what a step with
  drafts costs: accepted tokens over the ratio is the speed-up if the host took no time.

`--total-s` ends it early with what there is. The exit status is 1 if something failed, or if greedy
answers part at other places than near ties, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

CHECKOUT = Path(__file__).resolve().parent.parent
EMBEDDED = CHECKOUT / "k3jax" / "weights" / "embedded_model"
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

from mesh_bench.report import checkout  # noqa: E402
from speculation_bench import report  # noqa: E402

from k3jax.config import MAX_DRAFTS, DraftSampling  # noqa: E402
from pallas_kernels.settings import IMPLEMENTATIONS  # noqa: E402
from serving.option_types import number  # noqa: E402
from serving.options import DEFAULT_NGRAM_DRAFTS  # noqa: E402


def main() -> int:
    args = _parse_args()
    try:
        if args.report is not None:
            found = [json.loads(line) for line in args.report.read_text().splitlines()]
        else:
            found = _measure(args)
    except (ValueError, OSError) as error:
        print(f"bench_speculation.py: {error}", file=sys.stderr)
        return 2
    print(report.tables(found))
    if args.plot is not None:
        report.plot(found, args.plot)
    return int(report.has_failed(found))


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.compile_cache is not None:  # before jax is imported
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(args.compile_cache)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    from speculation_bench.run import run

    return run(args, _circumstances(args))


def _circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """Of the run; the same in all lines."""
    packages = ("jax", "jaxlib", "numpy")
    return {
        "commit": args.commit or checkout(CHECKOUT),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "kernels": args.kernels,
        "draft_sampling": args.draft_sampling,
        "context_tokens": args.context,
    }


def _parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (("model", "checkpoint folder"), ("draft", "folder of its draft model")):
        parser.add_argument(
            f"--{name}",
            type=Path,
            metavar="DIR",
            default=EMBEDDED / name,
            help=f"{what} (default: the embedded model's)",
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON line a case")
    parser.add_argument("--report", type=Path, metavar="FILE", help="show such a file instead")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the results")
    parser.add_argument(
        "--drafts",
        type=number(int, at_least=1, at_most=MAX_DRAFTS),
        nargs="+",
        default=list(range(1, 1 + MAX_DRAFTS)),
        metavar="N",
        help="of the draft model (default: 1 to 7)",
    )
    parser.add_argument(
        "--ngram-drafts",
        type=number(int, at_least=1, at_most=MAX_DRAFTS),
        default=DEFAULT_NGRAM_DRAFTS,
        metavar="N",
        help="default: %(default)s, as the server's",
    )
    parser.add_argument(
        "--draft-cost",
        type=number(float, at_least=0),
        default=0.1,
        metavar="C",
        help="for the controller, see serve.py (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-sampling", choices=get_args(DraftSampling), default="probabilistic"
    )
    parser.add_argument("--kernels", choices=("auto", *IMPLEMENTATIONS), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, default, meaning in (
        ("--prompts", 16, "of a workload, at most 16"),
        ("--new-tokens", 96, "of an answer"),
        ("--context", 1024, "tokens that the compiled steps have room for"),
        ("--repeats", 5, "of every case"),
        ("--total-s", 225, "seconds after which nothing new begins"),
        ("--compile-s", 150, "seconds for the compilation, out of these"),
        ("--case-s", 30, "seconds for one repeat of a case"),
    ):
        parser.add_argument(
            name,
            type=number(int, at_least=2 if name == "--new-tokens" else 1),
            default=default,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument("--compile-cache", type=Path, metavar="DIR", help="keep compiled steps")
    parser.add_argument("--commit", help="to record where this is no checkout")
    args = parser.parse_args(argv)
    if args.plot is not None and not report.can_plot():
        parser.error("--plot needs matplotlib, which is not installed; install '.[bench]'")
    return args


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still compile, or wait for a device that hangs, never join
