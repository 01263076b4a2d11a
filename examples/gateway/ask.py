"""Ask through the gateway with the `openai` client: completions and chat, whole and streamed."""

from __future__ import annotations

import argparse
import sys

import openai
from openai.types import CompletionUsage


def main(argv: list[str] | None = None) -> int:
    """Print four answers and return the exit code."""
    parser = argparse.ArgumentParser(prog="ask.py", description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Hello")
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        ask(openai.OpenAI(base_url=args.url, api_key="none"), args.prompt, args.max_tokens)
    except openai.APIError as error:
        print(f"ask.py: error: {error}", file=sys.stderr)
        return 1
    return 0


def ask(client: openai.OpenAI, prompt: str, max_tokens: int) -> None:
    """Ask in four ways.

    Raises:
      openai.APIError: the gateway is not there, or refuses.
    """
    model = client.models.list().data[0].id
    completion = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    print(f"completion: {completion.choices[0].text} [{count(completion.usage)}]")

    print("completion, streamed: ", end="")
    for chunk in client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    ):
        print(chunk.choices[0].text, end="", flush=True)

    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
    )
    message = chat.choices[0].message
    # The answer follows the reasoning, so a small limit of tokens may leave no room for it.
    print(f"\nchat: reasoning {reasoning_of(message)!r}, answer {message.content!r}", end=" ")
    print(f"[{count(chat.usage)}]")

    print("chat without reasoning, streamed: ", end="")
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        reasoning_effort="none",
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        else:
            print(f" [{count(chunk.usage)}]")


def reasoning_of(message: object) -> str | None:
    """The text of the thinking channel, which is an addition to OpenAI's API."""
    return getattr(message, "reasoning_content", None)


def count(usage: CompletionUsage | None) -> str:
    """Tokens of the prompt and of the answer."""
    assert usage is not None  # it was asked for
    return f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"


if __name__ == "__main__":
    sys.exit(main())
