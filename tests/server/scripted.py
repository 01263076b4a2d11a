"""A server whose model says what it is told to, with a tokenizer in Kimi K3's layout."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from k3jax.weights.embedded import EMBEDDED_MODEL
from serving.plan import RowPlan
from serving.tokenizer import Tokenizer
from tests.fakes import fake_geometry
from tests.server.harness import Harness, SlowExecutor, fake_load, model_info, serving

MODEL = "scripted"
_CHAT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tiktoken.model",
)
_PAGE_TOKENS, _CONTEXT_TOKENS = 64, 4096


class ScriptedExecutor(SlowExecutor):
    """A device that gives the same answer to every prompt, again and again until it is stopped.

    Attributes:
      prompts: ids of each request's prompt, in the order in which they came.
    """

    def __init__(self, answer: Sequence[int]):
        super().__init__(fake_geometry(page_tokens=_PAGE_TOKENS))
        self._answer = answer
        self._prompts: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}  # of prompts that are complete

    @property
    def prompts(self) -> list[list[int]]:
        return list(self._prompts.values())

    def _run_row(self, row: RowPlan, tokens: tuple[int, ...]) -> tuple[int, bool]:
        token, is_finite = super()._run_row(row, tokens)
        end = row.start + row.length
        if row.request_id not in self._lengths:
            self._prompts.setdefault(row.request_id, []).extend(tokens)
        if row.samples:
            length = self._lengths.setdefault(row.request_id, end)
            token = self._answer[(end - length) % len(self._answer)]
            self._token_buffer[row.slot] = token
        return token, is_finite


@contextlib.asynccontextmanager
async def scripted_server(
    folder: Path, answer: Sequence[int]
) -> AsyncIterator[tuple[Harness, ScriptedExecutor]]:
    """A server in this event loop. It names a folder that does not exist, so that clients need its
    tokenizer bundle.

    Args:
      folder: of `write_chat_folder`.
      answer: ids of every answer.
    """
    executor = ScriptedExecutor(answer)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    load = fake_load(
        executor,
        page_tokens=_PAGE_TOKENS,
        max_context_tokens=_CONTEXT_TOKENS,
        max_prefill_tokens=256,
        vocab_size=config["text_config"]["vocab_size"],
    )
    info = model_info(
        name=MODEL,
        folder=f"/models/{MODEL}",
        vocab_size=config["text_config"]["vocab_size"],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=(config["eos_token_id"],),
        max_context_tokens=_CONTEXT_TOKENS,
    )
    async with serving(load, folder=folder, info=info) as harness:
        yield harness, executor


def write_chat_folder(folder: Path) -> Path:
    """A model folder with a tokenizer in K3's layout, without weights."""
    for name in _CHAT_FILES:
        shutil.copy(EMBEDDED_MODEL / name, folder)
    return folder


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text in which control tokens are spelled out."""
    ids: list[int] = []
    for part in re.split(r"(<\|\w+\|>)", text):
        control = tokenizer.control_tokens.get(part)
        ids += tokenizer.encode(part) if control is None else [control]
    return ids
