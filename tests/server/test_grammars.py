"""Grammars through the real server: with drafts, beside other requests, in two processes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from serving.rpc.protocol import Stub, messages

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA |= {"additionalProperties": False}
PROMPT = b"def value(self):\n    return "


def request(name: str, **sampling: object) -> messages.GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 40, "seed": 3} | sampling
    return messages.GenerateRequest(
        request_id=name, tokenized=messages.TokenizedInput(input_ids=PROMPT),
        sampling_params=messages.SamplingParams(**params), stream=True,
    )  # fmt: skip


async def answer(stub: Stub, message: messages.GenerateRequest) -> bytes:
    ids = []
    async for reply in stub.Generate(message):
        ids += reply.chunk.token_ids
    return bytes(token for token in ids if token < 256)


async def ask(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        alone = await answer(stub, request("alone"))
        choice = messages.ChoiceConstraint(choices=["spam", "eggs"])
        free, chosen, matched, *objects = await asyncio.gather(
            answer(stub, request("free")),
            answer(stub, request("choice", choice=choice)),
            answer(stub, request("regex", regex="[a-z]{4}=[0-9]{2}")),
            answer(stub, request("json", json_schema=json.dumps(SCHEMA), max_tokens=200)),
            answer(stub, request("warm", json_schema=json.dumps(SCHEMA), temperature=1.0)),
        )
        assert free == alone
        assert chosen in (b"spam", b"eggs")
        assert re.fullmatch(rb"[a-z]{4}=[0-9]{2}", matched)
        for text in objects:
            assert text.startswith(b"{")
        assert await answer(stub, request("again", regex="[a-z]{4}=[0-9]{2}")) == matched
        with pytest.raises(grpc.aio.AioRpcError, match="regex is not understood"):
            await answer(stub, request("bad", regex="("))
        assert await answer(stub, request("after")) == alone


@pytest.mark.parametrize(
    "options", [("--speculate", "dspark"), ("--processes", "2", "--mesh", "tp2")], ids=str
)
def test_answers_follow_their_grammars(tmp_path: Path, options: tuple[str, ...]) -> None:
    command = [
        *(sys.executable, "scripts/serve.py", "--port", "0", "--cache-dir", str(tmp_path)),
        *("--dtype", "float32", "--max-context", "512", "--max-prefill-tokens", "64", *options),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith("ready "))
            asyncio.run(ask(ready.split()[1]))
        finally:
            process.terminate()
