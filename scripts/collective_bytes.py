"""Bytes that a step of a model moves between devices, read from its compiled program.

The model has its real widths and no weights; layers of each kind are compiled once and counted as
often as the model has them. The devices are simulated on the CPU, which changes no collective:
element types are those of the program (XLA:CPU itself carries bfloat16 in float32). Kimi K3 takes a
few seconds and 1 GB, up to 16 devices and more:

    python scripts/collective_bytes.py --mesh tp8 --rows 8
    python scripts/collective_bytes.py --mesh dp2xtp8 --tokens 8192 --dispatch all_to_all

Rows and tokens are those of one replica. `--dispatch ragged` is counted before optimisation, since
the CPU cannot compile it, and with full buffers; a padded all-to-all of more rounds than one counts
as `--rounds` says. With `JAX_PLATFORMS=cuda` the program is compiled for the GPUs of this host.

The exit status is 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from sharding.axes import CollectiveTail, Dispatch, Experts, ParallelConfig, ShardTokens, parse_mesh
from sharding.devices import prepare_devices

_K3 = Path(__file__).parents[1] / "tests" / "data" / "k3-config.json"


def main() -> int:
    args = _parse_args()
    try:
        parallel = ParallelConfig(
            **parse_mesh(args.mesh),
            experts=args.experts,
            dispatch=args.dispatch,
            tail=args.tail,
            shard_tokens=args.shard_tokens,
        )
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        notice = prepare_devices(parallel.num_ranks)
        if notice:
            print(notice, file=sys.stderr)
        result, table = _measure(args, parallel)
    except (ValueError, OSError) as error:
        print(f"collective_bytes.py: {error}", file=sys.stderr)
        return 2
    print(table)
    print(_summary(result, args))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _measure(args: argparse.Namespace, parallel: ParallelConfig) -> tuple[dict[str, Any], str]:
    """Everything about one step: as JSON, and its table."""
    # These import jax, so they follow the choice of devices.
    from mesh_bytes import programs, report

    from k3jax.buckets import Bucket
    from k3jax.config import ModelConfig
    from sharding.hlo import collectives, dot_flops

    cfg = ModelConfig.from_hf(json.loads(args.config.read_text()))
    few = programs.shortened(cfg)
    bucket = (
        Bucket("prefill", args.tokens, 1, 1)
        if args.tokens
        else Bucket("decode", args.rows, args.rows, 1)
    )
    texts = programs.step_texts(few, parallel, bucket)
    found = collectives(
        texts.optimised or texts.lowered,
        lowered=texts.lowered,
        # Log probabilities are exchanged only in steps with rows that ask for them.
        trips={"moe/experts": args.rounds, "logprobs": 0, "sample/logprobs": 0},
    )
    rows = report.rows(
        found,
        {i: programs.layer_kind(few, i) for i in range(few.num_layers)},
        Counter(programs.layer_kind(cfg, i) for i in range(cfg.num_layers)),
        args.ranks_per_host,
    )
    tail = dot_flops(texts.lowered, layer=few.num_layers - 1, scope="moe/tail")
    result = {
        "mesh": args.mesh,
        "experts": args.experts,
        "dispatch": args.dispatch,
        "tail": args.tail,
        "kind": bucket.kind,
        "tokens": bucket.tokens,
        "ranks_per_host": args.ranks_per_host,
        "is_optimised": texts.optimised is not None,
        "rows": [vars(row) | {"links": row.links._asdict()} for row in rows],
        "total": report.total(rows),
        "up_projection_flops": sum(tail.values()),
        "weight_bytes": programs.weight_bytes(cfg, parallel),
    }
    return result, report.text(rows)


def _summary(result: dict[str, Any], args: argparse.Namespace) -> str:
    total, weights = result["total"], result["weight_bytes"]
    inside_ms = total["inside_bytes"] / args.nvlink_gb_per_s / 1e6
    network_ms = total["network_bytes"] / args.network_gb_per_s / 1e6
    lines = [
        f"a step: {total['launches_inside']} collectives inside a host, "
        f"{total['launches_network']} between hosts",
        f"sent by one rank: {total['inside_bytes'] / 1e6:.2f} MB over NVLink, "
        f"{inside_ms:.3f} ms at {args.nvlink_gb_per_s:g} GB/s",
        f"                  {total['network_bytes'] / 1e6:.2f} MB over the network, "
        f"{network_ms:.3f} ms at {args.network_gb_per_s:g} GB/s",
        f"up-projection of one MoE tail: {result['up_projection_flops'] / 1e9:.3f} GFLOP",
        f"weights of one rank: {sum(weights.values()) / 1e9:.1f} GB, of which routed experts "
        f"{weights['experts'] / 1e9:.1f} GB",
    ]
    if not result["is_optimised"]:
        lines.append("counted before optimisation: this backend cannot compile the program")
    return "\n".join(lines)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", required=True, help="for example tp8 or dp2xtp8")
    parser.add_argument(
        "--config", type=Path, default=_K3, help="config.json of a checkpoint (default: Kimi K3)"
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--rows", type=_positive, help="of a decode step")
    size.add_argument("--tokens", type=_positive, help="of a prefill step")
    parser.add_argument("--experts", choices=get_args(Experts), default="ep")
    parser.add_argument("--dispatch", choices=get_args(Dispatch), default="all_gather")
    parser.add_argument("--tail", choices=("auto", *get_args(CollectiveTail)), default="auto")
    parser.add_argument("--shard-tokens", choices=get_args(ShardTokens), default="auto")
    parser.add_argument(
        "--rounds", type=_positive, default=1, help="of a padded all-to-all in a loop (default: 1)"
    )
    parser.add_argument("--ranks-per-host", type=_positive, default=8, help="default: 8")
    parser.add_argument("--nvlink-gb-per-s", type=float, default=450.0, help="default: 450")
    parser.add_argument("--network-gb-per-s", type=float, default=50.0, help="default: 50")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; expected >= 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
