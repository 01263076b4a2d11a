"""Plan, failures and reports of `scripts/bench_tp.py`. Nothing is measured by default."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as for the script itself

import bench_tp  # noqa: E402
from mesh_bench import launch, plot, report, steps  # noqa: E402
from mesh_bench.groups import FUSED, LAYOUTS, SIZES, Group  # noqa: E402

SECTIONS = ["tails", "collectives", "model", "layers", "dispatch"]


def test_every_form_runs_in_processes_of_its_own() -> None:
    groups = bench_tp.plan(8, SECTIONS, LAYOUTS, most_layers=12, smoke=False)
    assert len({group.name for group in groups}) == len(groups)
    assert Counter(group.section for group in groups) == {
        "tails": 4 + 3, "collectives": 2, "model": 3 + 2, "layers": 3 * 3, "dispatch": 2 * 3,
    }  # fmt: skip
    assert [group.layout for group in groups if group.form == FUSED] == ["one_process"] * 2
    shapes = {group.layout: (group.num_processes, group.devices_per_process) for group in groups}
    assert shapes == {"one_process": (1, 8), "process_per_gpu": (8, 1), "one_gpu": (1, 1)}
    some = bench_tp.plan(4, ["model", "layers"], ["one_gpu"], most_layers=3, smoke=False)
    assert [(group.name, group.most_layers) for group in some] == [
        (f"layers-{form}-one_gpu", 3) for form in ("base", "kda", "mla")
    ]


def test_a_trial_leaves_out_what_no_cpu_takes() -> None:
    groups = bench_tp.plan(2, SECTIONS, LAYOUTS, most_layers=1, smoke=True)
    forms = {group.form for group in groups}
    assert {"all_reduce", "columns", "all_to_all"} < forms
    assert not {FUSED, "ragged"} & forms


def test_collectives_are_those_of_decode() -> None:
    sizes = SIZES["k3_decode"]
    assert (min(sizes.collective_bytes), max(sizes.collective_bytes)) == (7_168, 114_688)
    assert list(sizes.tail_tokens) == [1, 8, 32, 128]
    assert list(sizes.rows) == [1, 8, 64]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("tp", "gigabytes", "layers"),
    [(8, 105.0, "KKKMKKKMKKKM"), (2, 105.0, "KKKMKKKMKK"), (8, 1.0, "K")],
)
def test_the_truncated_model_has_as_many_layers_as_fit(
    tp: int, gigabytes: float, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = ParallelConfig(tp=tp)
    mesh = make_mesh(parallel)

    class Device:
        def memory_stats(self) -> dict[str, float]:
            return {"bytes_limit": gigabytes * 1e9}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    found = steps.longest(SIZES["k3_decode"], parallel, mesh, 12)
    assert found == layers


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_tp.py", "--tp", "2", "--smoke", *arguments])
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return bench_tp.main()


def _measured(group: Group, *_: Any, **__: Any) -> list[dict[str, Any]]:
    """Stands for the processes of a group, of which those with one process a GPU fail."""
    if group.layout == "process_per_gpu":
        return [launch.failed("process 1 ended with code 9: no peer | access")]
    samples = {"unit": "us", "operations": 10, "samples": [30.0, 31.0, 32.0]}
    return [
        {"circumstances": {"device": {"kind": "abacus", "count": 2}, "versions": {"jax": "9"}}},
        {"case": "call", "shapes": {}, **samples},
        {"case": f"tail/{group.form}", "shapes": {"tokens": 8}, **samples},
    ]


def test_a_failure_is_reported_beside_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_group", _measured)
    out, text = tmp_path / "out.jsonl", tmp_path / "out.md"
    sections = ["--sections", "tails", "--json", str(out), "--report", str(text)]
    assert _run(monkeypatch, *sections) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sum("samples" in line for line in lines) == 3 * 2
    assert sum("failure" in line for line in lines) == 3
    written = text.read_text()
    assert "2 x abacus, jax 9" in written
    assert "| tail/folded | T 8 | us | 31 |" in written
    assert "## Failed: 3" in written
    assert "- tails-folded-process_per_gpu group : process 1 ended with code 9: no peer" in written


def test_what_has_no_time_left_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run_group", lambda *_, **__: pytest.fail("was started"))
    assert _run(monkeypatch, "--sections", "collectives", "--total-s", "0") == 1
    assert capsys.readouterr().out.count("not started: the time of the whole run is over") == 2


def test_a_run_without_failures_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launch, "run_group",
        lambda group, *_, **__: _measured(Group(section="tails", layout="one_process", limit_s=1)),
    )  # fmt: skip
    assert _run(monkeypatch, "--sections", "tails") == 0


def test_points_of_a_plot_are_times_over_sizes(tmp_path: Path) -> None:
    group = Group(section="tails", layout="one_process", limit_s=1, form="folded")
    results = report.complete(group, _measured(group), "c0ffee")
    assert report.series(results) == {
        ("tails", "us"): {"tail/folded, one_process": [(8, results[1]["net"])]}
    }
    if importlib.util.find_spec("matplotlib") is not None:
        plot.draw(results, tmp_path / "plot.svg")
        assert "</svg>" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize(
    ("devices", "count"), [("", 0), ("3", 1), ("0,1,5", 3)], ids=["none", "one", "three"]
)
def test_visible_gpus_are_counted(devices: str, count: int) -> None:
    assert bench_tp.count_gpus({"CUDA_VISIBLE_DEVICES": devices}) == count


def test_one_gpu_is_too_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        _run(monkeypatch, "--tp", "1")
    assert exit.value.code == 2
    assert "--tp is wrong: got 1; expected at least 2 GPUs" in capsys.readouterr().err


def test_a_trial_measures_on_two_simulated_devices(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = _process("--sections", "collectives", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["layout"] for line in lines} == {"one_process", "process_per_gpu"}
    assert {line["device"]["count"] for line in lines} == {2}
    assert Counter(line["case"] for line in lines) == dict.fromkeys(
        ("call", "bare/none", "bare/all_reduce", "bare/all_gather", "bare/reduce_scatter"), 2
    )
    assert all(line.get("collectives_as_written", True) for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_measures_every_section(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = _process(
        *("--sections", "tails", "model", "layers", "dispatch", "--most-layers", "2"),
        *("--layouts", "one_process", "one_gpu", "--limit-factor", "4", "--total-s", "880"),
        *("--json", str(out)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {json.loads(line)["case"] for line in out.read_text().splitlines()}
    assert {"tail/folded", "decode/KK/columns", "layer/kda", "layer/mla"} < cases


def _process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bench_tp.py", "--tp", "2", "--smoke", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
