"""Time decode over all GPUs of a host, at K3's real sizes, against one GPU.

Sections:

* `tails`: forms of the MoE tail at 1 to 128 tokens; the fused kernel up to 32, and in one process.
* `collectives`: an all-reduce, an all-gather and a reduce-scatter of 7 to 115 KB.
* `model`: decode of a truncated K3, as many layers as fit, at 1, 8 and 64 rows, with a form of the
  tail that projects everything everywhere (`all_reduce`) and with those that do not.
* `layers`: a decode step of one KDA and of one MLA layer, with random MXFP4 experts, on one GPU and
  on all; the difference of two truncations.
* `dispatch`: forms of the exchange with experts, whole experts over all GPUs.

Layouts: one process that drives all GPUs, one process a GPU, one GPU alone. Each form and layout
runs in processes of its own with a time limit, the most telling ones first. What fails, takes too
long, or finds no time left is listed, and the rest still runs:

    python scripts/bench_tp.py --json tp.jsonl --report tp.md --cache FOLDER
    JAX_PLATFORMS=cpu python scripts/bench_tp.py --tp 2 --smoke    tiny sizes on simulated devices

A run takes at most 9 minutes (`--total-s`); `--sections` and `--layouts` split it over several
calls, and with `--cache` a later call finds what was compiled. Numbers are made and checked as in
`bench_mesh.py`. NVLink multicast stays off in all processes. The exit status is 1 if anything
failed, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh_bench import command, plot, report
from mesh_bench.groups import DISPATCH_FORMS, FUSED, K3_DECODE, TAIL_FORMS, Group, Layout, Section

# Seconds for one form in one layout.
_LIMITS_S: Mapping[Section, float] = {
    "tails": 45, "collectives": 45, "model": 110, "layers": 80, "dispatch": 50,
}  # fmt: skip
_FORMS: Mapping[Section, Sequence[str | None]] = {
    "tails": (*TAIL_FORMS, FUSED),
    "collectives": (None,),
    "model": (TAIL_FORMS[0], FUSED, "columns"),
    "layers": tuple(K3_DECODE.truncations),
    "dispatch": DISPATCH_FORMS,
}
_ONLY_GPUS = (FUSED, "ragged")
_SEVERAL: tuple[Layout, ...] = ("one_process", "process_per_gpu")


def plan(
    ranks: int, sections: Sequence[str], layouts: Sequence[str], *, most_layers: int, smoke: bool
) -> list[Group]:
    """What runs, in this order.

    Args:
      smoke: leave out what no CPU takes.
    """
    return [
        Group(
            section=section, layout=layout, limit_s=limit_s, ranks=ranks, form=form,
            most_layers=most_layers,
        )
        for section, limit_s in _LIMITS_S.items()
        for layout in ((*_SEVERAL, "one_gpu") if section == "layers" else _SEVERAL)
        for form in _FORMS[section]
        if section in sections
        and layout in layouts
        and not (smoke and form in _ONLY_GPUS)
        and (form != FUSED or layout == "one_process")
    ]  # fmt: skip


def main() -> int:
    args = _parse_args()
    groups = plan(
        args.tp, args.sections, args.layouts, most_layers=args.most_layers, smoke=args.smoke
    )
    results = command.run(groups, args, sizes="k3_decode")
    text = report.markdown(results)
    print(text)
    if args.report is not None:
        args.report.write_text(text)
    if args.plot is not None:
        plot.draw(results, args.plot)
    return 1 if report.failures(results) else 0


def count_gpus(outer: Mapping[str, str]) -> int:
    """GPUs that JAX would see, without starting it."""
    if "CUDA_VISIBLE_DEVICES" in outer:
        return len([name for name in outer["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()])
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except OSError:
        return 0
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, metavar="N", help="GPUs (default: all of the host)")
    parser.add_argument("--sections", nargs="+", choices=_LIMITS_S, default=list(_LIMITS_S))
    parser.add_argument(
        "--most-layers", type=int, default=12, metavar="N",
        help="of the truncated K3; more take longer to compile (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write tables as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw; needs matplotlib")
    command.add_options(parser, total_s=530.0)
    args = command.parse(parser)
    if args.tp is None:
        args.tp = count_gpus(os.environ)
    if args.tp < 2:
        parser.error(f"--tp is wrong: got {args.tp}; expected at least 2 GPUs")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    return args


if __name__ == "__main__":
    sys.exit(main())
