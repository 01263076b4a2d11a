"""Cases, processes and results of `scripts/bench_mesh.py`. Nothing is measured by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from k3jax.config import ModelConfig

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as for the script itself

from bench_mesh import SECTIONS, groups  # noqa: E402
from mesh_bench import chains, launch, report  # noqa: E402
from mesh_bench.groups import K3, LAYOUTS, SMOKE, Group, text_config  # noqa: E402

RELEASED = json.loads((ROOT / "tests" / "data" / "k3-config.json").read_text())
TAILS = Group(section="tails", layout="process_per_gpu", limit_s=60)


def test_all_sections_run_in_both_layouts_of_two_devices() -> None:
    found = {(group.section, group.layout) for group in groups(SECTIONS, LAYOUTS)}
    both = {(section, layout) for section in SECTIONS for layout in LAYOUTS[:2]}
    assert found == both | {("steps", "one_gpu")}
    assert [group.layout for group in groups(["steps"], ["one_gpu"])] == ["one_gpu"]


@pytest.mark.parametrize("sizes", [K3, SMOKE])
def test_truncated_models_have_the_named_layers_and_sizes(sizes: Any) -> None:
    for layers in sizes.truncations.values():
        cfg = ModelConfig.from_hf(text_config(RELEASED, layers, sizes))
        assert [i in cfg.kda_layers for i in range(cfg.num_layers)] == [c == "K" for c in layers]
        assert (cfg.hidden_size, cfg.latent_size) == (sizes.hidden, sizes.latent)
        assert (cfg.num_experts, cfg.experts_per_token) == (sizes.num_experts, sizes.num_choices)
        assert cfg.moe_intermediate_size == sizes.expert_hidden
        assert cfg.moe_layers


def test_collectives_are_counted_whether_they_are_asynchronous_or_not() -> None:
    hlo = """
      %all-reduce-start.1 = f32[1,8]{1,0} all-reduce-start(%fusion.2), channel_id=1
      %all-reduce-done.1 = f32[1,8]{1,0} all-reduce-done(%all-reduce-start.1)
      %ar.2 = (f32[8]{0}, f32[4]{0}) all-reduce(%a, %b), metadata={op_name="jit(f)/psum"}
      %rs = f32[4]{0} reduce-scatter(%all-reduce.7), dimensions={0}
      %x = bf16[4,2]{1,0} ragged-all-to-all(%p, %q)
    """
    found = chains.count_collectives(hlo)
    assert found == {"all-reduce": 2, "reduce-scatter": 1, "ragged-all-to-all": 1}


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        ({"all-reduce": 6}, True),
        ({"all-reduce": 3}, True),  # two of each operation became one
        ({"all-reduce": 2}, False),
        ({"all-reduce": 7}, False),
        ({"all-reduce": 6, "all-gather": 1}, False),
        ({}, False),
    ],
)
def test_each_operation_must_have_its_collectives(found: dict[str, int], is_right: bool) -> None:
    assert chains.are_as_written(found, {"all-reduce": 2}, 3) == is_right


def test_no_process_may_use_multicast(tmp_path: Path) -> None:
    outer = {"NCCL_NVLS_ENABLE": "1", "CUDA_VISIBLE_DEVICES": "3,4", "PYTHONPATH": "elsewhere"}
    for group in groups(SECTIONS, LAYOUTS):
        env = launch.environment(group, tmp_path, outer, smoke=False)
        assert env["NCCL_NVLS_ENABLE"] == "0"
        assert env["PYTHONPATH"].endswith(os.pathsep + "elsewhere")
        assert env["CUDA_VISIBLE_DEVICES"] == ("3" if group.layout == "one_gpu" else "3,4")
    with pytest.raises(launch.ForbiddenFlag, match="nccl_user_buffers"):
        launch.check_flags({"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true"})


def test_a_group_that_takes_too_long_is_ended_and_reported(tmp_path: Path) -> None:
    start = time.monotonic()
    lines = launch.run_group(TAILS, tmp_path, tmp_path / "cache", sizes="smoke", limit_s=0.0)
    assert [line["failure"].partition(":")[0] for line in lines] == ["stopped at the time limit"]
    assert time.monotonic() - start < 10


def test_results_have_percentiles_and_the_cost_of_the_call_taken_off() -> None:
    lines = [
        {"circumstances": {"device": {"kind": "abacus"}}},
        _line("call", operations=50, samples=[2.0]),
        _line("tail/folded", operations=10, samples=[30.0, 31.0, 42.0, 33.0, 34.0], tokens=8),
        {"case": "tail/columns", "shapes": {"tokens": 8}, "failure": "WrongResult: no"},
    ]
    _, folded, columns = found = report.complete(TAILS, lines, "c0ffee")
    assert (folded["median"], folded["net"]) == (33.0, 33.0 - 50 * 2.0 / 10)
    assert 30.0 < folded["p10"] < 31.0 < folded["p90"] < 42.0
    assert (folded["commit"], folded["device"]) == ("c0ffee", {"kind": "abacus"})
    assert report.failures(found) == ["tails-process_per_gpu tail/columns T 8: WrongResult: no"]
    assert columns["commit"] == "c0ffee"
    text = report.table(found)
    assert "FAILED" in text
    assert "33" in next(line for line in text.splitlines() if line.startswith("tail/folded"))


def test_a_layer_is_the_difference_of_two_truncations() -> None:
    group = Group(section="steps", layout="one_gpu", limit_s=60)
    lines = [
        _line(f"decode/{layers}/alone", operations=1, samples=[value], unit="ms", rows=8, tp=1)
        for layers, value in (("KM", 5.0), ("KMK", 7.0), ("KMM", 8.5))
    ]
    derived = report.layer_times(report.complete(group, lines, "c0ffee"))
    assert {line["case"]: line["median"] for line in derived} == {
        "layer/kda": 2.0,
        "layer/mla": 3.5,
    }
    assert {line["shapes"]["layers"] for line in derived} == {"KMK - KM", "KMM - KM"}


def test_greedy_ids_are_compared_with_one_device_but_in_decode_only_on_the_same_mesh() -> None:
    def step(layout: str, case: str, ids: list[int], tp: int) -> report.Line:
        shapes = {"tp": tp, "rows": len(ids)}
        return {"layout": layout, "case": case, "shapes": shapes, "greedy_ids": ids}

    texts = report.same_ids(
        [
            step("one_process", "prefill/KM/tokens_on", [1], 2),
            step("one_process", "decode/KM/columns", [1, 2], 2),
            step("process_per_gpu", "decode/KM/columns", [1, 3], 2),
            step("one_gpu", "prefill/KM/alone", [1], 1),
            step("one_gpu", "decode/KM/alone", [7, 7], 1),
        ]
    )
    assert texts == [
        "prefill/KM/rows 1: one_process/tokens_on as one_gpu/alone: 1 of 1",
        "decode/KM/tp2/rows 2: process_per_gpu/columns as one_process/columns: 1 of 2",
    ]


@pytest.mark.slow
def test_a_smoke_run_measures_every_case(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, "scripts/bench_mesh.py", "--smoke", "--json", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["section"], line["layout"]) for line in lines} == {
        (group.section, group.layout) for group in groups(SECTIONS, LAYOUTS)
    }
    assert all(line.get("collectives_as_written", True) for line in lines)


def _line(
    case: str, *, operations: int, samples: list[float], unit: str = "us", **shapes: int
) -> report.Line:
    return {
        "case": case,
        "shapes": shapes,
        "unit": unit,
        "operations": operations,
        "samples": samples,
    }
