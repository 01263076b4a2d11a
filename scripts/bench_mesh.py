"""Time meshes of two GPUs: MoE tails, collectives, expert dispatch, and steps of a truncated K3.

Sections:

* `tails`: three forms of the MoE tail at K3's sizes.
* `collectives`: an all-reduce, an all-gather and a reduce-scatter alone.
* `dispatch`: the forms of the exchange between two ranks of experts, with experts that return their
  input, and with real MXFP4 experts.
* `steps`: decode and prefill of a few layers of K3 with random weights, through the server's step
  programs: rows, tail forms, prefill with and without sharded tokens. One layer's time is the
  difference of two truncations.

Layouts: one process that drives both GPUs (`one_process`), one process a GPU (`process_per_gpu`),
and for steps one GPU alone (`one_gpu`).

Cases of `tails` and `dispatch` are chains of dependent operations in one program, checked against a
float32 computation before they are timed. A sample is one call divided by its operations; `net`
takes off what a call costs with nothing in it. `!` marks programs whose collectives are not those
that were written (some were replaced). Each section and layout runs in processes of its own with a
time limit. What fails or runs out of time is listed, and the rest still runs:

    python scripts/bench_mesh.py --json mesh.jsonl          on two GPUs, at most 8.5 minutes
    JAX_PLATFORMS=cpu python scripts/bench_mesh.py --smoke  tiny sizes on two simulated devices

NVLink multicast stays off in all processes. The exit status is 1 if anything failed, and 2 for
wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from mesh_bench import command, report
from mesh_bench.groups import Group, Layout, Section

_LIMITS_S: Mapping[tuple[Section, Layout], float] = {
    ("tails", "process_per_gpu"): 120,
    ("tails", "one_process"): 120,
    ("collectives", "process_per_gpu"): 60,
    ("collectives", "one_process"): 60,
    ("dispatch", "process_per_gpu"): 110,
    ("dispatch", "one_process"): 110,
    ("steps", "process_per_gpu"): 210,
    ("steps", "one_process"): 210,
    ("steps", "one_gpu"): 150,
}
SECTIONS: tuple[Section, ...] = tuple(dict.fromkeys(section for section, _ in _LIMITS_S))


def groups(sections: Sequence[str], layouts: Sequence[str]) -> list[Group]:
    """The groups of some sections and layouts, in the order in which they run."""
    return [
        Group(section=section, layout=layout, limit_s=limit_s)
        for (section, layout), limit_s in _LIMITS_S.items()
        if section in sections and layout in layouts
    ]


def main() -> int:
    args = _parse_args()
    results = command.run(groups(args.sections, args.layouts), args, sizes="k3")
    failed = report.failures(results)
    print(report.table(results))
    print("\n".join(["", "greedy ids:", *report.same_ids(results)]))
    print("\n".join(["", f"failed: {len(failed)}", *failed]))
    return 1 if failed else 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    command.add_options(parser, total_s=510.0)
    return command.parse(parser)


if __name__ == "__main__":
    sys.exit(main())
