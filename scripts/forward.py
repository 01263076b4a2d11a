"""Logits of a token sequence through the paged pool, for comparison with other implementations.

`--chunk N` prefills in pieces of N tokens; `--decode K` sends the last K tokens one at a time
through the decode program. The output is float32 `[T, vocab]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import numpy as np

from k3jax.config import EngineConfig
from pallas_kernels.settings import IMPLEMENTATIONS, KernelSettings
from sharding.axes import Dispatch, Experts, ParallelConfig, ShardTokens, Tail, parse_mesh
from sharding.devices import prepare_devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--tokens", type=Path, required=True, help="int32 [T] .npy file")
    parser.add_argument("--out", type=Path, required=True, help="float32 [T, vocab] .npy file")
    parser.add_argument("--mesh", default="tp1", help="for example tp4 or dp2xtp4 (default: tp1)")
    for name, kind in (
        ("experts", Experts),
        ("dispatch", Dispatch),
        ("tail", Tail),
        ("shard-tokens", ShardTokens),
    ):
        default = getattr(ParallelConfig(), name.replace("-", "_"))
        parser.add_argument(
            f"--{name}",
            choices=get_args(kind),
            default=default,
            help=f"see sharding.axes.ParallelConfig (default: {default})",
        )
    parser.add_argument(
        "--kernels", choices=("auto", *IMPLEMENTATIONS), default="auto", help="see serve.py"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk", type=int, help="tokens of a prefill step (default: all)")
    parser.add_argument("--decode", type=int, default=0, help="last tokens, sent one at a time")
    args = parser.parse_args()
    try:
        parallel = ParallelConfig(
            **parse_mesh(args.mesh),
            experts=args.experts,
            dispatch=args.dispatch,
            tail=args.tail,
            shard_tokens=args.shard_tokens,
        )
        tokens = np.load(args.tokens)
        notice = prepare_devices(parallel.num_ranks)
        if notice:
            print(notice, file=sys.stderr)
        # These import jax, so they follow the choice of devices.
        from serving.build import load_model
        from serving.score import score

        engine = EngineConfig(
            dtype=args.dtype,
            max_rows=1,
            max_prefill_rows=1,
            max_context_tokens=max(1, tokens.size),
            kernels=KernelSettings(implementation=None if args.kernels == "auto" else args.kernels),
        )
        loaded = load_model(args.model, engine, parallel, unit_tokens=16)
        logits = score(loaded, tokens, chunk=args.chunk, num_decode=args.decode)
    except (ValueError, OSError) as error:
        print(f"forward.py: {error}", file=sys.stderr)
        return 2
    np.save(args.out, logits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
