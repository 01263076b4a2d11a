"""Time whole steps of a truncated K3 on one GPU: kernels, XLA, and programmatic dependent launch.

The model is the first layers of K3 at their real sizes with random weights, through the server's
step programs. Every configuration runs on the same weights and the same cache, one after the other:

* `xla`: every operator in XLA's form;
* `kernels`: what the server chooses by itself;
* `kernels+pdl`: the same, with programmatic dependent launch (PDL);

each with command buffers, which replay a step as a CUDA graph (`captured`), and without
(`launched`). Logits of decode steps are compared with those of `xla` before anything is timed. For
that the routers get large biases: a random router has near ties, and one expert for another makes
logits jump.

    python scripts/bench_step.py --json step.jsonl          on a GPU, about two minutes
    JAX_PLATFORMS=cpu python scripts/bench_step.py --smoke  tiny sizes, anywhere

The table shows medians: of single calls, each waited for; of calls that follow each other, as in a
server (`chained`); and by a trace of one call how many operations it launched and how long any of
them ran (`busy`). The JSON names those that took most. The exit status is 1 if a configuration
failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

from mesh_bench import groups, steps  # noqa: E402
from mesh_bench.timing import sample  # noqa: E402
from read_trace import profiled  # noqa: E402

from k3jax.buckets import Bucket  # noqa: E402
from k3jax.compile import COMPILER_OPTIONS, abstract_arguments, initial_state  # noqa: E402
from k3jax.step import scoring_step, serving_step  # noqa: E402
from pallas_kernels.settings import KernelSettings  # noqa: E402
from sharding.axes import ParallelConfig  # noqa: E402
from sharding.mesh import make_mesh  # noqa: E402

Params = Mapping[str, Mapping[str, Any]]
KERNELS: Mapping[str, KernelSettings] = {
    "xla": KernelSettings(implementation="xla"),
    "kernels": KernelSettings(),
    "kernels+pdl": KernelSettings(pdl=True),
}
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "captured": {},
    "launched": {"xla_gpu_enable_command_buffer": "", "xla_gpu_graph_min_graph_size": 1_000_000},
    "launched, XLA PDL": {
        "xla_gpu_enable_command_buffer": "",
        "xla_gpu_graph_min_graph_size": 1_000_000,
        "xla_gpu_enable_pdl": True,
        "xla_gpu_enable_pdl_launch": True,
    },
}
_ROUTER_BIAS = 3.0  # standard deviation; scores are in 0 to 1
_NAMED_OPERATIONS = 40
_CHAINED = 8
_MOST_GAP = 0.03  # of the largest logit, between the best ids; random weights have near ties
_MOST_ERROR = 0.05  # relative to the norm of the logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of the table."""

    bucket: Bucket
    kernels: str
    graphs: str

    @property
    def is_compared(self) -> bool:
        """Of decode steps, and those that launching can make wrong."""
        early = KERNELS[self.kernels].pdl
        return self.bucket.kind == "decode" and (early or self.graphs == "captured")


def main() -> int:
    args = _parse_args()
    sizes = groups.SMOKE if args.smoke else groups.K3
    parallel = ParallelConfig()
    truncation = steps.make_truncation(sizes.base, sizes, parallel, make_mesh(parallel))
    (variant,) = steps.variants(sizes.base, sizes, parallel, truncation.program.layout.page_tokens)
    bench = Bench(truncation, sizes)
    failed = False
    columns = ("ms", 9), ("x xla", 8), ("chained", 9), ("busy", 8), ("launches", 10)
    titles = "".join(f"{name:>{width}}" for name, width in columns)
    print(f"{'step':22}{'kernels':14}{'graphs':18}{titles}")
    for bucket in variant.buckets:
        if not step_name(bucket).startswith(tuple(args.only)):
            continue
        xla_ms: float | None = None
        for line in bench.lines(bucket):
            if "ms" in line:
                xla_ms = xla_ms or line["ms"]  # the first line is that of XLA
                line["times_xla"] = line["ms"] / xla_ms
            failed |= "failure" in line
            print(_row(line), flush=True)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return int(failed)


class Bench:
    """Runs configurations on one set of weights and one pool."""

    def __init__(self, truncation: steps.Truncation, sizes: groups.Sizes):
        self._truncation, self._sizes = truncation, sizes
        moe = truncation.params["moe"]
        bias = _ROUTER_BIAS * np.random.default_rng(0).standard_normal(moe["router_bias"].shape)
        biased = jax.device_put(bias.astype(np.float32), moe["router_bias"].sharding)
        self._decided = {**truncation.params, "moe": {**moe, "router_bias": biased}}
        self._pool, self._buffers = initial_state(truncation.program, truncation.mesh)

    def lines(self, bucket: Bucket) -> Iterator[dict[str, Any]]:
        """One line for each configuration of a step."""
        chosen = _configurations(bucket)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            compiled = list(threads.map(self._compile, chosen))
        params = self._truncation.params
        packed = steps.packed_inputs(self._truncation.program, bucket, self._sizes)
        reference: np.ndarray | None = None
        for one, programs in zip(chosen, compiled, strict=True):
            line = dataclasses.asdict(one) | {
                "step": step_name(bucket),
                "layers": self._truncation.layers,
                "device": jax.devices()[0].device_kind,
            }
            try:
                if isinstance(programs, Exception):
                    raise programs
                step, *scoring = programs
                for program in scoring:
                    logits = self._scores(program, packed)
                    reference = logits if reference is None else reference
                    line |= _compare(logits, reference)
                self._refill()
                line |= self._times(functools.partial(self._call, step, packed, params))
            except Exception as error:
                line["failure"] = f"{type(error).__name__}: {error}"[:500]
            yield line

    def _times(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Of single calls, of calls that follow each other, and of what runs on the device."""
        seconds = sample(call, target_s=self._sizes.step_s, most=self._sizes.most_samples)
        chains = sample(
            lambda: [call() for _ in range(_CHAINED)][-1],
            target_s=self._sizes.step_s, most=self._sizes.most_samples,
        )  # fmt: skip
        trace = profiled(call)
        return {
            "ms": statistics.median(seconds) * 1e3,
            "ms_min": min(seconds) * 1e3,
            "samples": len(seconds),
            "chained_ms": statistics.median(chains) * 1e3 / _CHAINED,
            "busy_ms": trace.busy_us / 1e3,
            "launches": trace.launches,
            "operations": trace.kernels[:_NAMED_OPERATIONS],
        }

    def _compile(self, one: Configuration) -> list[jax.stages.Compiled] | Exception:
        """The step, and where logits are compared the same step that returns them."""
        program = dataclasses.replace(self._truncation.program, kernels=KERNELS[one.kernels])
        mesh = self._truncation.mesh
        arguments = abstract_arguments(program, mesh, one.bucket)
        options = {**COMPILER_OPTIONS, **GRAPHS[one.graphs]}
        try:
            return [
                make_step(program, mesh, one.bucket)
                .lower(*arguments)
                .compile(compiler_options=options)
                for make_step in (serving_step, *([scoring_step] if one.is_compared else []))
            ]
        except Exception as error:
            return error

    def _scores(self, step: jax.stages.Compiled, packed: np.ndarray) -> np.ndarray:
        """Logits `[T, V]` of the step on a fresh pool."""
        self._refill()
        return np.asarray(self._call(step, packed, self._decided))[0]

    def _refill(self) -> None:
        self._pool = None  # its memory is free for the new one
        self._pool = steps.random_pool(self._truncation.program, self._truncation.mesh)

    def _call(self, step: jax.stages.Compiled, packed: np.ndarray, params: Params) -> jax.Array:
        self._pool, self._buffers, result = step(params, self._pool, self._buffers, packed)
        return result


def step_name(bucket: Bucket) -> str:
    """Kind and tokens."""
    return f"{bucket.kind}-{bucket.tokens}"


def _configurations(bucket: Bucket) -> list[Configuration]:
    """How a program is launched matters in short steps only."""
    pairs = [("xla", "captured"), ("kernels", "captured")]
    if bucket.kind == "decode":
        pairs += [("kernels+pdl", "captured")]
        pairs += [(kernels, "launched") for kernels in KERNELS]
        pairs += [("kernels+pdl", "launched, XLA PDL")]
    return [Configuration(bucket=bucket, kernels=k, graphs=g) for k, g in pairs]


def _compare(logits: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """How far logits `[T, V]` are from a reference.

    Raises:
      ValueError: too far.
    """
    error = float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))
    best, chosen = reference.argmax(-1), logits.argmax(-1)
    rows = np.arange(len(best))
    gaps = (reference[rows, best] - reference[rows, chosen]) / np.abs(reference).max(-1)
    if not (error <= _MOST_ERROR and gaps.max() <= _MOST_GAP):
        raise ValueError(f"logits differ from xla's: error {error:.2g}, gap {gaps.max():.2g}")
    return {"error": error, "gap": float(gaps.max()), "equal_ids": float(np.mean(best == chosen))}


def _row(line: dict[str, Any]) -> str:
    start = f"{line['step']:22}{line['kernels']:14}{line['graphs']:18}"
    if "failure" in line:
        return f"{start}failed: {line['failure']}"
    compared = ""
    if "error" in line:
        compared = f"  error {line['error']:.1e}, equal ids {line['equal_ids']:.0%}"
    times = f"{line['ms']:9.2f}{line['times_xla']:8.3f}{line['chained_ms']:9.2f}"
    return f"{start}{times}{line['busy_ms']:8.2f}{line['launches']:10.0f}{compared}"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to append one JSON line a result to")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="STEP",
        help="starts of the steps to time, for example decode-8 (default: all)",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
