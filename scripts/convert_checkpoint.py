"""Convert a released checkpoint into one that restores quickly onto any mesh (Orbax, uncompressed).

The output folder also holds the configuration and the tokenizer, so it can be given to
`scripts/serve.py --model`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sharding.axes import ParallelConfig, parse_mesh
from sharding.devices import prepare_devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of dense weights (default: bfloat16, as released; it also restores as float32)",
    )
    parser.add_argument(
        "--mesh",
        default="tp1",
        help="devices that hold the weights meanwhile, for example tp8 (default: tp1)",
    )
    args = parser.parse_args()
    try:
        parallel = ParallelConfig(**parse_mesh(args.mesh))
        notice = prepare_devices(parallel.num_ranks)
        if notice:
            print(notice, file=sys.stderr)
        convert(args.model, args.out, parallel, args.dtype)
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint.py: {error}", file=sys.stderr)
        return 2
    print(f"converted: {args.out}")
    return 0


def convert(model_dir: Path, out_dir: Path, parallel: ParallelConfig, dtype: str) -> None:
    """Load `model_dir` onto a mesh and save it to `out_dir`."""
    # These import jax, so they follow the choice of devices.
    from k3jax.weights import load_params, progress_bar, read_model_config
    from k3jax.weights.converted import check_output, save
    from sharding.mesh import make_mesh

    check_output(out_dir)
    cfg = read_model_config(model_dir)
    with progress_bar("loading") as show:
        params = load_params(model_dir, cfg, parallel, make_mesh(parallel), dtype, progress=show)
    save(params, cfg, model_dir=model_dir, out_dir=out_dir, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
