"""`scripts/collective_bytes.py`: arithmetic of links, grouping of layers, and the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3jax.buckets import Bucket
from k3jax.config import ModelConfig
from scripts.mesh_bytes.programs import shortened, step_texts
from scripts.mesh_bytes.report import links, rows, total
from sharding.axes import ParallelConfig
from sharding.hlo import Collective, collectives, dot_flops
from tests import tiny

ROOT = Path(__file__).parents[2]
KB = 1024


def collective(**changes: Any) -> Collective:
    fields = {
        "name": "one", "kind": "all-reduce", "layer": 0, "scope": "moe/tail", "dtype": "f32",
        "bytes_in": 16 * KB, "bytes_out": 16 * KB, "groups": (tuple(range(16)),), "channel": 1,
        "times": 1,
    }  # fmt: skip
    return Collective(**(fields | changes))


ACROSS = (tuple(range(16)),)  # both hosts of eight
WITHIN = (tuple(range(8)), tuple(range(8, 16)))
PAIRS = tuple((i, i + 8) for i in range(8))


@pytest.mark.parametrize(
    ("kind", "groups", "bytes_in", "bytes_out", "inside", "network"),
    [
        ("all-reduce", WITHIN, 16, 16, 28, 0),
        ("all-reduce", ACROSS, 16, 16, 28, 2),
        ("all-reduce", PAIRS, 16, 16, 0, 16),
        ("all-gather", ACROSS, 1, 16, 14, 1),
        ("reduce-scatter", ACROSS, 16, 1, 14, 1),
        ("reduce-scatter", PAIRS, 16, 8, 0, 8),
        ("all-to-all", ACROSS, 16, 16, 7, 8),
        ("ragged-all-to-all", PAIRS, 16, 16, 0, 8),
    ],
)
def test_links(
    kind: str, groups: Any, bytes_in: int, bytes_out: int, inside: float, network: float
) -> None:
    one = collective(kind=kind, groups=groups, bytes_in=bytes_in * KB, bytes_out=bytes_out * KB)
    assert links(one, ranks_per_host=8) == (inside * KB, network * KB)


def test_hosts_with_unequal_parts_of_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="divide a group of one: got 6; expected hosts with the"):
        links(collective(), ranks_per_host=6)


def test_layers_of_several_kinds_that_are_alike_are_one_row() -> None:
    attention = {"scope": "attention", "groups": WITHIN}
    found = [
        collective(name="embed", layer=None, scope="embed", groups=WITHIN),
        collective(name="a0", layer=0, **attention),
        collective(name="a1", layer=1, **attention),
        collective(name="a2", layer=2, **attention),
        collective(name="t2", layer=2, times=3),
        collective(name="alone", layer=2, scope="alone", groups=((0,), (1,))),
    ]
    kinds = {0: "kda+dense", 1: "kda+moe", 2: "kda+moe"}
    table = rows(found, kinds, {"kda+dense": 1, "kda+moe": 92}, ranks_per_host=8)
    assert [(row.scope, row.layers, row.launches) for row in table] == [
        ("embed", 1, 1),
        ("attention", 93, 1),
        ("moe/tail", 92, 3),
    ]
    assert total(table) == {
        "launches_inside": 94,
        "launches_network": 92 * 3,
        "inside_bytes": (94 * 28 + 92 * 3 * 28) * KB,
        "network_bytes": 92 * 3 * 2 * KB,
    }


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/collective_bytes.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_tiny_model(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    attention = {"kda_layers": [1, 2, 3], "full_attn_layers": []}
    small = {"num_hidden_layers": 3, "first_k_dense_replace": 0, "linear_attn_config": attention}
    config.write_text(json.dumps(tiny.tiny_json(**small)))
    arguments = ("--config", config, "--rows", "3", "--ranks-per-host", "2", "--json", out)
    done = run("--mesh", "dp2xtp2", *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    by_place = {(row["scope"], row["kind"], row["dtype"]): row for row in result["rows"]}
    # Hidden 40, latent 64; each replica is one host.
    tail = by_place["moe/tail", "all-reduce", "f32"]
    assert (tail["layers"], tail["bytes_in"]) == (3, 4 * 3 * (64 + 40))
    combine = by_place["moe/experts/combine", "reduce-scatter", "f32"]
    assert combine["links"] == {"inside": 0.0, "network": 4 * 3 * 64}
    assert result["up_projection_flops"] == 2 * 3 * 64 * 40
    # 12 experts of 3 matrices 64 x 32 in 3 layers: 4 bits, and 8 bits a group of 32.
    assert result["weight_bytes"]["experts"] == 3 * (12 // 4) * 3 * 64 * 32 * 17 // 32
    assert "moe/experts/combine" in done.stdout


def test_a_mesh_that_does_not_divide_is_refused() -> None:
    done = run("--mesh", "dp3xtp5", "--rows", "1")
    assert done.returncode == 2
    assert "num_experts does not divide over the mesh: got 896" in done.stderr
    assert "num_attention_heads does not divide over the mesh: got 96" in done.stderr


K3 = shortened(ModelConfig.from_hf(json.loads((tiny.DATA / "k3-config.json").read_text())))
H, L, V, A = 7168, 3584, 163840, 16


def largest(bucket: Bucket, **mesh: Any) -> tuple[dict[tuple[str, str, str], int], int]:
    """The larger side of what the last layer of K3, and what lies outside of layers, move; and
    FLOPs of the layer's up-projection."""
    texts = step_texts(K3, ParallelConfig(**mesh), bucket)
    assert texts.optimised is not None
    moved: dict[tuple[str, str, str], int] = {}
    for one in collectives(texts.optimised, lowered=texts.lowered):
        if one.layer in (None, 3) and one.group_size > 1:
            key = (one.scope, one.kind, one.dtype)
            moved[key] = moved.get(key, 0) + max(one.bytes_in, one.bytes_out)
    return moved, sum(dot_flops(texts.optimised, layer=3, scope="moe/tail").values())


@pytest.mark.slow
def test_a_decode_step_at_the_real_widths_of_k3() -> None:
    assert K3.num_layers == 4
    rows = 8
    moved, flops = largest(Bucket("decode", rows, rows, 1), tp=8, tail="columns")
    assert moved == {
        ("embed", "all-reduce", "bf16"): 2 * rows * H,
        ("attention/sum", "all-reduce", "f32"): 4 * rows * H,
        ("moe/tail", "all-reduce", "f32"): 4 * rows * L,
        ("moe/tail", "reduce-scatter", "f32"): 4 * rows * H,
        ("moe/tail", "all-gather", "bf16"): 2 * rows * H,
        ("head", "all-gather", "f32"): 4 * rows * V,
    }
    assert flops == 2 * rows * L * H // 8


@pytest.mark.slow
def test_a_prefill_step_at_the_real_widths_of_k3() -> None:
    tokens, dp, tp = 8192, 2, 4
    moved, flops = largest(Bucket("prefill", tokens, 1, 1), dp=dp, tp=tp)
    assert moved == {
        ("embed", "reduce-scatter", "bf16"): 2 * tokens * H,
        ("attention/gather", "all-gather", "bf16"): 2 * tokens * H,
        ("attention/sum", "reduce-scatter", "f32"): 4 * tokens * H,
        ("moe/shared", "all-gather", "bf16"): 2 * tokens * H,
        ("moe/shared", "reduce-scatter", "f32"): 4 * tokens * H,
        ("moe/experts/dispatch", "all-gather", "u16"): dp * tokens * (2 * L + 8 * A),
        ("moe/experts/combine", "reduce-scatter", "f32"): 4 * dp * tokens * L,
        ("load", "all-reduce", "s32"): 4 * dp * tp,
        ("head", "all-reduce", "bf16"): 2 * H,
        ("head", "all-gather", "f32"): 4 * V,
        ("result", "all-gather", "s32"): 4 * dp * (2 + dp * tp),
    }
    assert flops == 2 * tokens * L * H // tp
