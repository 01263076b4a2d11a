"""Train the embedded model and its DSpark draft on the sources of Python's standard library.

    python scripts/train_embedded.py --out DIR                     on one H200, ten minutes
    python scripts/train_embedded.py --out NEW --draft-only DIR/model    another draft for a model
    JAX_PLATFORMS=cpu python scripts/train_embedded.py --out DIR --smoke   a few steps, anywhere

`DIR/model` and `DIR/draft` are checkpoints in the released layouts, with experts in MXFP4, which is
rounded to during training as well. `DIR/training.json` records seed, versions, files with their
SHA-256, loss curves, the held-out loss in nats and bits a byte, and how likely the target takes the
draft's tokens by their place in the block.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from embedded_training import config, data, draft, loop, target  # noqa: E402
from embedded_training.export import read_target, released_tensors  # noqa: E402
from embedded_training.tokenizer import NUM_RANKS, write_tokenizer  # noqa: E402

from k3jax.config import ModelConfig  # noqa: E402
from k3jax.draft.config import DraftConfig  # noqa: E402
from k3jax.params import AnyConfig  # noqa: E402
from k3jax.weights.synthetic import write_tensors  # noqa: E402

OWN_TEXTS = 1536  # of the model, for its draft to learn from
LICENCE = "PSF License Agreement (https://docs.python.org/3/license.html)"


def main() -> int:
    args = _parse_args()
    size = (4, 48) if args.smoke else (64, 512)
    plan = {
        "model": loop.Schedule(
            steps=3 if args.smoke else args.steps, batch=size[0], tokens=size[1],
            peak_rate=3e-3, seed=args.seed,
        ),
        "draft": loop.Schedule(
            steps=3 if args.smoke else args.draft_steps, batch=size[0], tokens=size[1],
            peak_rate=2e-3, seed=args.seed,
        ),
    }  # fmt: skip
    corpus = data.read_corpus(NUM_RANKS, NUM_RANKS + 2)
    print(f"{len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out", flush=True)
    cfg = ModelConfig.from_hf(config.model_config())
    dense = dataclasses.replace(cfg, expert_format="dense")
    draft_cfg = DraftConfig.from_hf(config.draft_config())
    draft_cfg.check_target(cfg)

    record = {} if args.draft_only is None else _read_record(args.draft_only)
    curves: dict[str, list[dict[str, float]]] = record.get("curves", {})
    if args.draft_only is None:
        params = _follow("model", target.train(dense, corpus.train, plan["model"]), curves)
        loss = target.held_out_loss(params, dense, corpus.held_out, *size)
        print(f"held out: {loss:.4f} nats, {loss / math.log(2):.3f} bits a byte", flush=True)
        _write(args.out / "model", cfg, config.model_config(), params)
        write_tokenizer(args.out / "model", cfg.max_position_tokens)
        record |= {"held_out_nats": loss, "held_out_bits_per_byte": loss / math.log(2)}

    frozen = read_target(args.draft_only or args.out / "model", dense)
    own = target.own_texts(
        frozen, dense, corpus.train, texts=4 if args.smoke else OWN_TEXTS, tokens=size[1] // 2,
        seed=args.seed + 2,
    )  # fmt: skip
    print(f"{len(own)} texts of its own", flush=True)
    draft_params = _follow(
        "draft", draft.train(draft_cfg, dense, frozen, corpus.train, own, plan["draft"]), curves
    )
    score = draft.held_out_score(draft_params, draft_cfg, dense, frozen, corpus.held_out, *size)
    print("taken, by place: ", np.round(score.agree, 3).tolist(), flush=True)
    _write(args.out / "draft", draft_cfg, config.draft_config(), draft_params)
    schedules = {name: dataclasses.asdict(schedule) for name, schedule in plan.items()}
    record |= {
        "seed": args.seed,
        "schedules": record.get("schedules", schedules) | {"draft": schedules["draft"]},
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "python": data.python_version()},
        "data": {"licence": LICENCE, "files": corpus.files},
        "own_texts": len(own),
        "draft_taken_by_place": np.asarray(score.agree).tolist(),
        "draft_equal_by_place": np.asarray(score.equal).tolist(),
        "curves": curves,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _read_record(model: Path) -> dict[str, Any]:
    """The record of the training that made a model."""
    return json.loads((model.parent / "training.json").read_text())


def _write(folder: Path, cfg: AnyConfig, hf_config: dict[str, Any], params: loop.Tree) -> None:
    """Write a checkpoint of one shard in the released layout."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, hf_config, released_tensors(cfg, params), num_shards=1)


def _follow(
    name: str, progress: Iterator[loop.Progress], curves: dict[str, list[dict[str, float]]]
) -> loop.Tree:
    """Print and record a training; return the parameters at its end."""
    reached: loop.Tree = {}
    curves[name] = []
    for step, loss, seconds, params in progress:
        curves[name].append({"step": step, "loss": loss, "seconds": seconds})
        print(f"{name} step {step}: loss {loss:.4f}, {seconds:.0f} s", flush=True)
        reached = params
    return reached


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=1300, help="of the model")
    parser.add_argument("--draft-steps", type=int, default=2000)
    parser.add_argument(
        "--draft-only", type=Path, metavar="DIR", help="train a new draft for this DIR/model"
    )
    parser.add_argument("--seed", type=int, default=20261201)
    parser.add_argument("--smoke", action="store_true", help="three short steps of each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
