"""The program `examples/gateway/start.py` with the embedded model, and the `openai` client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest

from serving.processes.children import free_ports
from serving.rpc.protocol import Stub, messages
from tests.server.gateway import SMG, Answer, chat, client, complete, needs_gateway

pytestmark = [pytest.mark.slow, needs_gateway]

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 290.0, 60.0
MODEL, MAX_ROWS, MAX_CONTEXT = "k3-embedded", 4, 512
NUM_TOKENS = 24


class Running(NamedTuple):
    """Server and gateway; both write to `log`."""

    url: str
    address: str
    log: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gateway")
    port, http_port, metrics_port = free_ports(3)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "examples/gateway/start.py", "--smg", SMG),
                *("--http-port", str(http_port), "--http-metrics-port", str(metrics_port)),
                *("--port", str(port), "--cache-dir", str(folder), "--dtype", "float32"),
                *("--max-rows", str(MAX_ROWS), "--max-prefill-rows", "2"),
                *("--max-context", str(MAX_CONTEXT), "--max-prefill-tokens", "128"),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        end_s = time.monotonic() + START_S
        while (found := re.search(r"^gateway ready (\S+)", log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.2)
        yield Running(found[1], f"127.0.0.1:{port}", log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        assert "closed steps=" in log.read_text(), "the server was not let to drain"
    finally:
        process.terminate()  # it ends both
        process.wait(STOP_S)


async def ask(openai: Any, number: int, *, stream: bool) -> Answer:
    """The answer to one of sixteen prompts: chats and completions of different lengths."""
    options = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS}
    options["extra_body"] = {"ignore_eos": True}
    text = f"{number}: " + "why and how? " * (number % 5)
    if number % 2:
        return await complete(openai, stream=stream, prompt=text, **options)
    message = {"role": "user", "content": text}
    return await chat(openai, stream=stream, messages=[message], reasoning_effort="none", **options)


async def test_sixteen_at_once_equal_their_solo_runs_whole_and_streamed(running: Running):
    async with client(running.url) as openai:
        solo = [await ask(openai, number, stream=False) for number in range(16)]
        together = await asyncio.gather(*(ask(openai, i, stream=i % 4 < 2) for i in range(16)))
        streamed = await asyncio.gather(*(ask(openai, i, stream=i % 4 >= 2) for i in range(16)))
    assert len({answer.text for answer in solo}) > 8  # the prompts matter
    for number, answer in enumerate(solo):
        assert answer.text
        assert answer.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage[1] == NUM_TOKENS
        if number % 2:
            assert answer.usage[0] == len(f"{number}: " + "why and how? " * (number % 5))
    assert together == solo
    assert streamed == solo


async def test_reused_prefix_is_in_the_usage_and_the_text_is_that_of_a_direct_client(
    running: Running,
):
    prompt = "prefix " * 45  # 315 tokens
    options = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS}
    async with client(running.url) as openai:
        cold = await complete(openai, stream=False, **options)
        warm = await complete(openai, stream=True, **options)
    assert cold.usage is not None
    assert cold.usage == (315, cold.usage[1], 0)
    assert warm.usage == (315, cold.usage[1], 256)
    assert cold.text == warm.text
    command = [sys.executable, "scripts/client.py", "--address", running.address, prompt]
    command += ["--max-tokens", str(NUM_TOKENS), "--temperature", "0"]
    direct = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert direct.stdout == cold.text + "\n"


async def test_choices_are_those_of_their_seeds_and_log_probabilities_come_with_tokens(
    running: Running,
):
    message = {"role": "user", "content": "Hello"}
    ask: dict[str, Any] = {"model": MODEL, "messages": [message], "reasoning_effort": "none"}
    ask |= {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
    async with client(running.url) as openai:
        reply = await openai.chat.completions.create(**ask, seed=5, n=2)
        alone = [await chat(openai, stream=True, seed=seed, **ask) for seed in (5, 6)]
        greedy = await openai.chat.completions.create(
            **ask, temperature=0, logprobs=True, top_logprobs=3
        )
    assert [choice.message.content for choice in reply.choices] == [each.text for each in alone]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    (choice,) = greedy.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert each.logprob == max(other.logprob for other in each.top_logprobs)
        assert len(each.top_logprobs) == 3


async def test_client_that_leaves_ends_its_request_in_the_server(running: Running):
    async with client(running.url) as openai:
        stream = await openai.completions.create(
            model=MODEL, prompt="x", stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        async with grpc.aio.insecure_channel(running.address) as channel:
            stub = Stub(channel)
            assert await num_active(stub) == 1
            await stream.close()
            end_s = time.monotonic() + 2.0
            while await num_active(stub):
                assert time.monotonic() < end_s, "the request goes on"
                await asyncio.sleep(0.02)
            loads = await stub.GetLoads(messages.GetLoadsRequest())
    assert loads.loads[0].num_used_tokens == 0
    ended = re.findall(r"finish_reason=abort .* completion_tokens=(\d+)", running.log.read_text())
    assert len(ended) == 1
    assert int(ended[0]) < MAX_CONTEXT - 1


async def num_active(stub: Stub) -> int:
    return (await stub.GetServerInfo(messages.GetServerInfoRequest())).active_requests


async def test_faults_of_a_request_come_with_their_reason(running: Running):
    import openai as library

    async with client(running.url) as openai:
        for prompt, max_tokens, reason in (
            ("x" * 600, 4, "maximum context length is 512 tokens"),  # said by the gateway
            ("x" * 500, 30, "lower max_tokens to 12 or less"),  # said by the server
            ("x", 0, "max_tokens is out of range: got 0"),
        ):
            with pytest.raises(library.BadRequestError, match=reason):
                await openai.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens)
        with pytest.raises(library.NotFoundError):
            await openai.completions.create(model="other", prompt="x")
        # None of them has counted as a fault of the server.
        assert (await complete(openai, stream=False, model=MODEL, prompt="x", max_tokens=1)).usage


def test_the_sample_prints_four_answers(running: Running):
    run = subprocess.run(
        [sys.executable, "examples/gateway/ask.py", "--url", running.url, "--max-tokens", "8"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    text = re.match(r"completion: (.+) \[5 \+ 8 tokens\]\n", run.stdout, re.DOTALL)
    assert text is not None, run.stdout
    assert f"completion, streamed: {text[1]}\n" in run.stdout
    assert run.stdout.count(" + 8 tokens]\n") == 3
