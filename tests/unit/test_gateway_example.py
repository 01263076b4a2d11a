"""What `examples/gateway/start.py` says when it cannot start. The rest is in `tests/server`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gateway import start

ROOT = Path(__file__).parents[2]


def test_missing_gateway_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        start.main(["--smg", "no/such/smg"])
    assert exit.value.code == 2
    assert "--smg is not found: got no/such/smg" in capsys.readouterr().err


def test_server_that_does_not_start_ends_the_example():
    command = [sys.executable, "examples/gateway/start.py", "--smg", sys.executable]
    run = subprocess.run(
        [*command, "--max-rows", "0"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    refused, ended = run.stderr.splitlines()
    assert refused.startswith("serve.py: error: ")
    assert ended == "start.py: error: the server ended with exit code 2"
