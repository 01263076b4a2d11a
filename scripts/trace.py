"""Write an XLA profile trace of a few steps of the server's programs.

The trace holds a prefill step and some decode steps of the embedded model, or of `--model`. Its
scopes name the layer and its kind, as in `layer_3/mla/attend`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from k3jax.config import EngineConfig
from serving import replicas
from serving.page_table import empty_table
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits
from sharding.axes import ParallelConfig, parse_mesh
from sharding.devices import prepare_devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("trace"), help="folder (default: trace)")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: embedded model)")
    parser.add_argument("--mesh", default="tp1", help="for example tp4 (default: tp1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=4, help="requests in a step (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each (default: 32)")
    parser.add_argument("--steps", type=int, default=5, help="decode steps (default: 5)")
    args = parser.parse_args()
    try:
        _trace(args)
    except (ValueError, OSError) as error:
        print(f"trace.py: {error}", file=sys.stderr)
        return 2
    return 0


def _trace(args: argparse.Namespace) -> None:
    parallel = ParallelConfig(**parse_mesh(args.mesh))
    notice = prepare_devices(parallel.num_ranks)
    if notice:
        print(notice)
    # These import jax, so they follow the choice of devices.
    import jax

    from k3jax.weights import EMBEDDED_MODEL
    from serving.build import build_executor, choose_num_pages, load_model

    engine = EngineConfig(
        dtype=args.dtype,
        max_rows=args.rows,
        max_prefill_rows=args.rows,
        max_prefill_tokens=args.rows * args.prompt_tokens,
        max_context_tokens=args.prompt_tokens + args.steps + 1,
    )
    loaded = load_model(args.model or EMBEDDED_MODEL, engine, parallel)
    num_pages = choose_num_pages(loaded)
    built = build_executor(loaded, num_pages=num_pages)
    limits = make_limits(
        engine, loaded.geometry, num_pages=num_pages, vocab_size=loaded.cfg.vocab_size
    )
    state = replicas.initial_replicas(
        [empty_table(loaded.geometry, num_pages)] * parallel.dp, limits
    )
    for request in _requests(args, loaded.cfg.vocab_size):
        state = replicas.submit(state, limits, request)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would record every Python call
    jax.profiler.start_trace(args.out, profiler_options=options, create_perfetto_trace=True)
    while not replicas.is_idle(state):
        state, step = replicas.plan(state, limits)
        assert step is not None  # all requests fit, and nothing is in flight
        with jax.profiler.StepTraceAnnotation(step.bucket.kind, step_num=step.step_id):
            result = built.executor.collect(built.executor.dispatch(step))
        state, _ = replicas.commit(state, result)
    jax.profiler.stop_trace()
    print(f"trace of {state[0].next_step_id} steps written to {args.out}; open it with one of")
    print(f"  xprof --logdir {args.out}")
    print("  the Perfetto viewer, on its perfetto_trace.json.gz")


def _requests(args: argparse.Namespace, vocab_size: int) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for row in range(args.rows):
        yield Request(
            request_id=f"row{row}",
            prompt=tuple(rng.integers(0, vocab_size, args.prompt_tokens).tolist()),
            sampling=SamplingParams(temperature=0.0, seed=row, max_tokens=args.steps + 1),
            eos_token_ids=(),
        )


if __name__ == "__main__":
    sys.exit(main())
