"""The real program: `scripts/serve.py` with the embedded model on two simulated devices."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from serving import replicas
from serving.record import read_record, replay
from serving.rpc.protocol import Stub, common, messages
from serving.tokenizer import Detokenizer, load_zip

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 240.0, 40.0
MAX_CONTEXT = 512
UNIT = 16  # tokens that can be reused; a page has 128


@dataclasses.dataclass(frozen=True)
class RunningServer:
    address: str
    process: subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def serve(port: int, cache_dir: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(
                sys.executable,
                "scripts/serve.py",
                "--port",
                str(port),
                "--cache-dir",
                str(cache_dir),
            ),
            *("--mesh", "tp2", "--dtype", "float32", "--max-rows", "4"),
            *("--max-context", str(MAX_CONTEXT), "--max-prefill-tokens", "64"),
            *("--hash-block-size", str(UNIT), *options),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    port = free_port()
    cache_dir = tmp_path_factory.mktemp("cache")
    process = serve(port, cache_dir, "--record", str(cache_dir / "record"))
    assert process.stdout is not None
    lines, end_s = [], time.monotonic() + START_S
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready "):
            break
        assert time.monotonic() < end_s, lines
    assert lines[-1].startswith(f"ready 127.0.0.1:{port}"), lines
    yield RunningServer(f"127.0.0.1:{port}", process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 0, output
    *_, last = replay(*read_record(cache_dir / "record"))
    assert replicas.is_idle(last.replicas)
    assert f"steps={last.replicas[0].next_step_id} " in output


def request(request_id: str, prompt_length: int, max_tokens: int) -> messages.GenerateRequest:
    rng = np.random.default_rng(prompt_length)
    return messages.GenerateRequest(
        request_id=request_id,
        tokenized=messages.TokenizedInput(input_ids=rng.integers(0, 256, prompt_length).tolist()),
        sampling_params=messages.SamplingParams(
            temperature=1.0, seed=prompt_length, max_tokens=max_tokens, ignore_eos=True
        ),
        stream=True,
    )


async def tokens_of(stub: Stub, message: messages.GenerateRequest) -> list[int]:
    """All tokens of a stream; checks that it ends with one complete message."""
    replies = [reply async for reply in stub.Generate(message)]
    assert [reply.WhichOneof("response") for reply in replies[:-1]] == ["chunk"] * (
        len(replies) - 1
    )
    complete = replies[-1].complete
    assert complete.finish_reason == "length"
    tokens = [token for reply in replies[:-1] for token in reply.chunk.token_ids]
    assert len(tokens) == message.sampling_params.max_tokens
    return tokens


async def used_tokens(stub: Stub) -> int:
    reply = await stub.GetLoads(messages.GetLoadsRequest())
    load = reply.loads[0]
    assert load.num_running_reqs + load.num_waiting_reqs == load.num_total_reqs
    return load.num_used_tokens


async def cancelled_after_its_first_chunk(stub: Stub) -> None:
    call = stub.Generate(request("cancelled", 50, 400))
    await anext(aiter(call))
    call.cancel()


async def over_its_deadline(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request("late", 60, 400), timeout=0.5):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def refused(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens_of(stub, request("refused", MAX_CONTEXT, 1))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details()
    assert details is not None
    assert f"got {MAX_CONTEXT} tokens" in details


async def test_eight_streams_of_which_five_end_and_equal_their_solo_runs(
    server: RunningServer,
) -> None:
    lengths = (1, 17, 64, 65, 130)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        assert await used_tokens(stub) == 0
        solo = [await tokens_of(stub, request(f"solo{n}", n, 12)) for n in lengths]
        assert len({tuple(tokens) for tokens in solo}) == len(lengths)
        together = await asyncio.gather(
            *(tokens_of(stub, request(f"together{n}", n, 12)) for n in lengths),
            cancelled_after_its_first_chunk(stub),
            over_its_deadline(stub),
            refused(stub),
        )
        assert list(together[: len(lengths)]) == solo
        end_s = time.monotonic() + 1.0  # KF-V02
        while await used_tokens(stub):
            assert time.monotonic() < end_s, "pages were not released"
            await asyncio.sleep(0.02)


async def test_shared_prompt_is_not_computed_again_and_gives_the_same_answer(
    server: RunningServer,
) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        replies = [
            [reply async for reply in stub.Generate(request(name, 300, 24))]
            for name in ("cold", "warm")
        ]
    assert [reply[-1].complete.cached_tokens for reply in replies] == [0, 299 // UNIT * UNIT]
    cold, warm = ([id for r in reply for id in r.chunk.token_ids] for reply in replies)
    assert len(cold) == 24
    assert cold == warm


async def test_prompt_that_grows_inside_a_page_reuses_all_its_whole_units(
    server: RunningServer,
) -> None:
    prompt = [*request("", 100, 1).tokenized.input_ids]
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        await answer_to(stub, asking("first", prompt, max_tokens=8))
        second = await answer_to(stub, asking("second", [*prompt, 7, 8], max_tokens=8))
        await stub.FlushCache(common.FlushCacheRequest(timeout_s=5.0))
        cold = await answer_to(stub, asking("cold", [*prompt, 7, 8], max_tokens=8))
    assert [second.cached_tokens, cold.cached_tokens] == [96, 0]
    assert second.output_ids == cold.output_ids


def asking(request_id: str, prompt: list[int], **sampling: Any) -> messages.GenerateRequest:
    """A greedy request, unless `sampling` says otherwise."""
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | sampling
    return messages.GenerateRequest(
        request_id=request_id,
        tokenized=messages.TokenizedInput(input_ids=prompt),
        sampling_params=messages.SamplingParams(**fields),
    )


async def answer_to(stub: Stub, message: messages.GenerateRequest) -> messages.GenerateComplete:
    (reply,) = [reply async for reply in stub.Generate(message)]
    return reply.complete


async def test_fields_of_a_request_are_honoured(server: RunningServer) -> None:
    prompt = list(request("", 70, 1).tokenized.input_ids)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        archive = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
        tokenizer = load_zip(b"".join(chunk.data for chunk in archive))
        assert tokenizer is not None
        plain = await answer_to(stub, asking("plain", prompt, logprobs=3))
        tokens = list(plain.output_ids)
        # What was told of tokens that were decoded is told of them as a prompt, too.
        scored = await answer_to(
            stub, asking("scored", prompt + tokens, max_tokens=1, prompt_logprobs=3)
        )
        assert scored.cached_tokens == 0
        told, again = plain.output_logprobs, scored.input_logprobs
        numbers = [one.value for one in again.token_logprobs[-len(tokens) :]]
        np.testing.assert_allclose(numbers, told.token_logprobs, atol=1e-3)
        ranked = [list(top.values) for top in again.top_logprobs[-len(tokens) :]]
        np.testing.assert_allclose(ranked, [top.values for top in told.top_logprobs], atol=1e-3)

        texts = [Detokenizer(tokenizer).push(tokens[:count]) for count in range(len(tokens) + 1)]
        stop = texts[9][-4:]
        end = next(count for count, text in enumerate(texts) if stop in text)
        stopped = await answer_to(stub, asking("stop", prompt, stop=[stop]))
        assert (list(stopped.output_ids), stopped.matched_stop_str) == (tokens[:end], stop)

        biased = await answer_to(stub, asking("biased", prompt, logit_bias={65: 100.0}))
        assert list(biased.output_ids) == [65] * 12
        spread = await answer_to(
            stub,
            asking("spread", prompt, logit_bias={65: 100.0, 66: 99.0}, frequency_penalty=2.0),
        )
        assert set(spread.output_ids) == {65, 66}
        late = await answer_to(
            stub, asking("late", prompt, stop_token_ids=tokens[:1], min_tokens=5)
        )
        assert tokens[0] not in list(late.output_ids)[:5]
        narrow = await answer_to(stub, asking("narrow", prompt, temperature=2.0, min_p=1.0))
        assert list(narrow.output_ids) == tokens

        several = [
            reply.complete
            async for reply in stub.Generate(asking("n", prompt, temperature=1.0, seed=3, n=2))
        ]
        alone = [
            await answer_to(stub, asking(f"seed{seed}", prompt, temperature=1.0, seed=seed))
            for seed in (3, 4)
        ]
    several.sort(key=lambda one: one.index)
    assert [one.output_ids for one in several] == [one.output_ids for one in alone]
    assert several[0].output_ids != several[1].output_ids


def test_client_streams_python(server: RunningServer) -> None:
    command = [sys.executable, "scripts/client.py", "--address", server.address]
    command += ["--max-tokens", "48", "--temperature", "0", "    if not isinstance("]
    runs = [
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                       capture_output=True, text=True, timeout=60, check=True)
        for _ in range(2)
    ]  # fmt: skip
    assert "raise" in runs[0].stdout
    assert runs[0].stdout == runs[1].stdout


def test_a_second_server_on_the_port_is_one_clear_error(
    server: RunningServer, tmp_path: Path
) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    process = serve(port, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in output.splitlines()[-1]
    assert "Traceback" not in output
