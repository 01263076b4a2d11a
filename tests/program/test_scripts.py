"""The command-line contracts of `scripts/forward.py` and `scripts/trace.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import forward
from tests import tiny
from tests.models import relative_error

ROOT = Path(__file__).parents[2]


def run(script: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # A cached program keeps the scope names of the run that compiled it.
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    return subprocess.run(
        [sys.executable, f"scripts/{script}", *map(str, args)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_forward_writes_float32_logits_of_every_token(tmp_path: Path) -> None:
    folder = tiny.DATA / "kimi-linear-tiny"
    with np.load(folder / "expected.npz") as expected:
        tokens, want = expected["len40.tokens"], expected["len40.logits"]
    np.save(tmp_path / "tokens.npy", tokens)
    out = tmp_path / "logits.npy"
    result = run(
        "forward.py", "--model", folder, "--tokens", tmp_path / "tokens.npy", "--out", out,
        "--mesh", "tp2", "--chunk", "17", "--decode", "3", "--dtype", "float32",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    got = np.load(out)
    assert got.dtype == np.float32
    assert relative_error(got, want) <= 1e-4


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], [], "tokens have the wrong form"),
        ([1, 160], [], "tokens are out of range: got 1..160; expected 0..159"),
        ([1, 2], ["--decode", "2"], "decode is out of range: got 2; expected 0..1"),
        ([1, 2], ["--chunk", "0"], "chunk is out of range: got 0"),
        ([1, 2], ["--mesh", "tp3"], "num_attention_heads does not divide over the mesh"),
        ([1, 2], ["--mesh", "x"], "mesh is not understood: got 'x'"),
    ],
)
def test_forward_refuses_with_a_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tokens: list[int],
    options: list[str],
    message: str,
) -> None:
    np.save(tmp_path / "tokens.npy", np.array(tokens, np.int32))
    monkeypatch.setattr(forward, "prepare_devices", lambda num_devices: None)  # they are there
    arguments = [
        "forward.py", "--model", tiny.DATA / "kimi-linear-tiny",
        "--tokens", tmp_path / "tokens.npy", "--out", tmp_path / "out.npy", *options,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    assert forward.main() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()


def test_forward_without_a_model_ends_with_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([1], np.int32))
    result = run(
        "forward.py", "--model", tmp_path, "--tokens", tmp_path / "tokens.npy",
        "--out", tmp_path / "out.npy",
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith("forward.py: ")
    assert "Traceback" not in result.stderr


def test_trace_names_the_layer_kinds(tmp_path: Path) -> None:
    result = run(
        "trace.py", "--out", tmp_path / "trace", "--rows", "1", "--prompt-tokens", "8",
        "--steps", "2", "--model", tiny.DATA / "kimi-linear-tiny",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "trace of 3 steps" in result.stdout
    (trace,) = (tmp_path / "trace").rglob("*.xplane.pb")
    content = trace.read_bytes()
    for scope in (b"layer_0/kda/delta", b"layer_2/mla/attend", b"layer_1/moe/experts", b"dense"):
        assert scope in content
