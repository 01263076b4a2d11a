"""The gateway `smg` in front of a server, and its `openai` client: answers whole and streamed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from examples.gateway import start
from serving.processes.children import free_ports

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DEADLINE_S = 60.0  # of one answer

# Beside Python, in PATH, or named by the variable.
SMG = os.environ.get("SMG") or start.build_parser().get_default("smg")
needs_gateway = pytest.mark.skipif(
    shutil.which(SMG) is None or importlib.util.find_spec("openai") is None,
    reason="needs the group `gateway`: openai, and smg beside Python, in PATH or named by $SMG",
)


@contextlib.asynccontextmanager
async def gateway(address: str, model: str) -> AsyncIterator[AsyncOpenAI]:
    """Run the gateway in front of a server, and yield a client of it once it is ready."""
    port, metrics_port = free_ports(2)
    args, _ = start.build_parser().parse_known_args(
        ["--http-port", str(port), "--http-metrics-port", str(metrics_port), "--smg", SMG]
    )
    url = f"http://{args.http_host}:{port}"
    with start.child(*start.gateway_command(args, address)) as process:
        try:
            await asyncio.to_thread(start.wait_gateway, process, url, model)
            async with client(f"{url}/v1") as openai:
                yield openai
        finally:
            process.kill()  # told to end, it would wait some seconds for nothing


def client(url: str) -> AsyncOpenAI:
    """A client that hides no failure by trying again."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S)


@dataclasses.dataclass
class Answer:
    """An answer, whole or put together from its stream.

    Attributes:
      calls: name and arguments of the tool calls.
      matched_stop: the token or the text that ended it.
      usage: tokens of the prompt, of the answer, and of the prompt's reused part.
    """

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    usage: tuple[int, int, int] | None = None

    def end(self, choice: Any) -> None:
        """Note how a choice ended, if it did."""
        assert self.finish_reason is None, "a choice goes on after its end"
        self.finish_reason = choice.finish_reason
        self.matched_stop = getattr(choice, "matched_stop", None)


async def chat(openai: AsyncOpenAI, *, stream: bool, **options: Any) -> Answer:
    """Ask for a chat completion."""
    return await (_streamed_chat if stream else _whole_chat)(openai, options)


async def complete(openai: AsyncOpenAI, *, stream: bool, **options: Any) -> Answer:
    """Ask for a text completion."""
    answer = Answer()
    if not stream:
        reply = await openai.completions.create(**options)
        answer.text, answer.usage = reply.choices[0].text, _usage(reply.usage)
        answer.end(reply.choices[0])
        return answer
    async with await _stream(openai.completions, options) as chunks:
        async for chunk in chunks:
            answer.usage = _usage(chunk.usage)
            for choice in chunk.choices:
                answer.text += choice.text
                answer.end(choice)
    return answer


async def _whole_chat(openai: AsyncOpenAI, options: dict[str, Any]) -> Answer:
    reply = await openai.chat.completions.create(**options)
    (choice,) = reply.choices
    functions = [call.function for call in choice.message.tool_calls or ()]
    answer = Answer(
        reasoning=getattr(choice.message, "reasoning_content", None) or "",
        text=choice.message.content or "",
        calls=[(function.name, json.loads(function.arguments)) for function in functions],
        usage=_usage(reply.usage),
    )
    answer.end(choice)
    return answer


async def _streamed_chat(openai: AsyncOpenAI, options: dict[str, Any]) -> Answer:
    answer, calls = Answer(), dict[int, tuple[str, str]]()
    async with await _stream(openai.chat.completions, options) as chunks:
        async for chunk in chunks:
            answer.usage = _usage(chunk.usage)
            for choice in chunk.choices:
                answer.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                answer.text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    name, arguments = calls.get(call.index, ("", ""))
                    name += call.function.name or ""
                    calls[call.index] = (name, arguments + (call.function.arguments or ""))
                answer.end(choice)
    answer.calls = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]
    return answer


async def _stream(resource: Any, options: dict[str, Any]) -> Any:
    return await resource.create(**options, stream=True, stream_options={"include_usage": True})


def _usage(usage: Any) -> tuple[int, int, int] | None:
    if usage is None:
        return None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, usage.completion_tokens, details.cached_tokens
