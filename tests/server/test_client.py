"""`scripts/client.py` against a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
from pathlib import Path

from tests.fakes import EOS, FakeExecutor, fake_geometry, fake_request, solo_tokens
from tests.server.harness import (
    DEADLINE_S,
    SlowExecutor,
    fake_load,
    serving,
    write_model_folder,
)

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Run:
    code: int
    stdout: str
    stderr: str


async def client(*arguments: str) -> Run:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "scripts" / "client.py"),
        *arguments,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Run(process.returncode, stdout.decode(), stderr.decode())


def text_of(prompt: str, max_tokens: int, seed: int = 0) -> str:
    """What the fake model answers, as its byte tokenizer spells it."""
    tokens = solo_tokens(fake_request("c", prompt.encode(), max_tokens=max_tokens, seed=seed))
    return bytes(tokens).decode()


async def test_kf_v13_client_prints_no_part_of_a_stop_string(tmp_path: Path):
    whole = text_of("HI 1!", 12, seed=5)
    async with serving(folder=write_model_folder(tmp_path)) as harness:
        options = ("--max-tokens", "12", "--seed", "5", "--request-id", "c", "--stats")
        stops = ("--stop", whole[4:7], "--stop", "never")
        run = await client("--address", harness.address, *options, *stops, "HI 1!")
    assert run.stdout == whole[:4] + "\n"
    assert "finish_reason=stop prompt_tokens=5 completion_tokens=7" in run.stderr


async def test_client_prints_the_answer(tmp_path: Path):
    async with serving(folder=write_model_folder(tmp_path)) as harness:
        options = ("--max-tokens", "12", "--seed", "5", "--request-id", "c", "--stats")
        run = await client("--address", harness.address, *options, "HI 1!")
    assert run.code == 0, run.stderr
    assert run.stdout == text_of("HI 1!", 12, seed=5) + "\n"
    assert "finish_reason=length prompt_tokens=5 completion_tokens=12 cached_tokens=0" in run.stderr


async def test_kf_v19_client_does_not_print_the_end_token(tmp_path: Path):
    executor = FakeExecutor(fake_geometry(), scripted={("c", 2): 65, ("c", 3): EOS})
    async with serving(fake_load(executor), folder=write_model_folder(tmp_path)) as harness:
        run = await client("--address", harness.address, "--request-id", "c", "HI")
    assert (run.code, run.stdout) == (0, "A\n")


async def test_client_tells_that_there_is_no_server():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        run = await client("--address", f"127.0.0.1:{taken.getsockname()[1]}", "x")
    assert run.code == 1
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "no server answers" in run.stderr


async def test_client_tells_why_a_request_was_refused(tmp_path: Path):
    async with serving(folder=write_model_folder(tmp_path)) as harness:
        run = await client("--address", harness.address, "--temperature=-1", "HI")
        assert run.code == 1
        assert run.stderr.count("\n") == 1
        assert "INVALID_ARGUMENT: temperature is out of range: got -1.0" in run.stderr
        run = await client("--address", harness.address, "--top-k=-1", "HI")
        assert run.code == 1
        assert "out of range" in run.stderr


async def test_client_gives_up_after_its_timeout(tmp_path: Path):
    executor = SlowExecutor(fake_geometry(page_tokens=64))
    load = fake_load(executor, page_tokens=64, max_context_tokens=3000)
    async with serving(load, folder=write_model_folder(tmp_path)) as harness:
        run = await client("--address", harness.address, "--timeout", "0.3", "HI")
        await harness.until_idle(1.0)
    assert run.code == 1
    assert "--timeout" in run.stderr


async def test_client_needs_a_tokenizer_from_the_server():
    async with serving() as harness:
        run = await client("--address", harness.address, "HI")
    assert run.code == 1
    assert "NOT_FOUND" in run.stderr
