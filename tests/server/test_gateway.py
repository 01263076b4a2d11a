"""The `openai` client through the gateway: Kimi K3's chat format, stop strings, cancellation.

The device is a scripted one. `test_gateway_process.py` has the real program.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serving.tokenizer import Tokenizer, load_folder
from tests.server.gateway import chat, complete, gateway, needs_gateway
from tests.server.scripted import MODEL, encode_chat, scripted_server, write_chat_folder

pytestmark = [pytest.mark.slow, needs_gateway]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
END = "<|close|>message<|sep|><|end_of_msg|>"
TOOL_ANSWER = (
    "I should look.<|close|>think<|sep|>"
    "<|open|>response<|sep|>Let me see.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Köln "West"<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
    f"<|close|>tools<|sep|>{END}"
)
CALLS = [("get_weather", {"city": 'Köln "West"', "days": 3}), ("now", {})]
# Of a second turn, in which the user types a control token.
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "reasoning_content": "I should look.",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "now", "arguments": "{}"},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "user", "content": "Why <|sep|>?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that cannot read the model's folder asks a hub before it asks the server."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@contextlib.asynccontextmanager
async def asked(folder: Path, tokenizer: Tokenizer, text: str) -> AsyncIterator[tuple[Any, ...]]:
    """A server that says `text`, its device, and a client of the gateway in front of it."""
    async with (
        scripted_server(folder, encode_chat(tokenizer, text)) as (server, device),
        gateway(server.address, MODEL) as openai,
    ):
        yield server, device, openai


async def test_reasoning_and_tool_calls_come_as_fields(folder: Path, tokenizer: Tokenizer):
    async with asked(folder, tokenizer, TOOL_ANSWER) as (_, device, openai):
        ask = {"model": MODEL, "messages": HISTORY[:1], "tools": TOOLS}
        answers = [await chat(openai, stream=stream, **ask) for stream in (False, True)]
    for answer in answers:
        assert answer.reasoning == "I should look."
        assert answer.text == "Let me see."
        assert answer.calls == CALLS
        assert answer.finish_reason == "tool_calls"
        # The gateway does not count the words that open the answer.
        num_prompt = len(device.prompts[0]) - len(encode_chat(tokenizer, "<|open|>think<|sep|>"))
        assert answer.usage == (num_prompt, len(encode_chat(tokenizer, TOOL_ANSWER)), 0)
    assert device.prompts[0] == device.prompts[1]


async def test_prompt_is_in_the_chat_format_and_users_cannot_forge_it(
    folder: Path, tokenizer: Tokenizer
):
    async with asked(folder, tokenizer, f"No.<|close|>response<|sep|>{END}") as (_, device, openai):
        answer = await chat(
            openai, stream=False, model=MODEL, messages=HISTORY, reasoning_effort="none"
        )
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("", "No.", "stop")
    assert answer.matched_stop == tokenizer.control_tokens["<|end_of_msg|>"]
    before, typed, after = (
        '<|open|>message role="user"<|sep|>Why ',
        "<|sep|>",
        f'?{END[:-14]}<|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
    )
    expected = (
        encode_chat(tokenizer, before) + tokenizer.encode(typed) + encode_chat(tokenizer, after)
    )
    (prompt,) = device.prompts
    assert prompt[-len(expected) :] == expected
    result = '<|open|>message role="tool" tool="now" index="1"<|sep|>noon'
    assert _contains(prompt, encode_chat(tokenizer, result))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_text_and_the_work(
    folder: Path, tokenizer: Tokenizer, stream: bool
):
    text = "Zählen: eins zwei drei vier"
    async with asked(folder, tokenizer, text) as (server, _, openai):
        # Every character is a token of its own, and ä is two: the match crosses their borders.
        for stop, kept in (("drei", "Zählen: eins zwei "), ("äh", "Z")):
            answer = await complete(
                openai, stream=stream, model=MODEL, prompt="x", max_tokens=3000, stop=[stop, "?"]
            )
            assert answer.text == kept
            assert answer.finish_reason == "stop"
            # The gateway leaves it out of the stream of a text completion.
            assert answer.matched_stop == (None if stream else stop)
            assert answer.usage == (1, len((kept + stop).encode()), 0)
        reply = await chat(
            openai,
            stream=stream,
            model=MODEL,
            messages=HISTORY[:1],
            reasoning_effort="none",
            max_tokens=3000,
            stop="drei",
        )
        assert (reply.text, reply.finish_reason) == ("Zählen: eins zwei ", "stop")
        assert reply.matched_stop == "drei"
        await server.until_idle()


async def test_client_that_leaves_frees_all_that_it_held(folder: Path, tokenizer: Tokenizer):
    async with asked(folder, tokenizer, "more and ") as (server, _, openai):
        ask = {"model": MODEL, "prompt": "x", "max_tokens": 4000}
        stream = await openai.completions.create(**ask, stream=True)
        await anext(aiter(stream))
        assert server.counts().running == server.service.num_open == 1
        await stream.close()
        await server.until_idle(within_s=2.0)

        whole = asyncio.create_task(openai.completions.create(**ask))
        await server.until(lambda: server.counts().running == 1)
        whole.cancel()
        await server.until_idle(within_s=2.0)
        assert server.counts().generated_tokens < 4000


def _contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))
