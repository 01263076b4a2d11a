"""The server on a Hopper GPU: the same greedy tokens with kernels and with XLA's forms.

bfloat16 rounds differently in the two, and a model with random weights has near ties. So answers
may part, but only where XLA's own logits of the two tokens are almost equal. Near ties of experts
would make logits jump (in 65 tokens by up to 79 %, XLA in bfloat16 against float32), so the
router's bias is large: it decides, and they differ by 3 % at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.weights import synthetic
from pallas_kernels.settings import KernelSettings
from serving.build import LoadedModel
from serving.rpc.protocol import Stub, messages
from serving.score import score
from tests import tiny
from tests.models import load_folder

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 5, 63, 64, 65, 130, 300)
MAX_TOKENS = 32
NEAR = 0.03  # of the largest logit
# Heads, latents and experts of the widths that the kernels take; few of each.
SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 128,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 512,
    "routed_expert_hidden_size": 512,
    "linear_attn_config": {"num_heads": 8, "head_dim": 128},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = tiny.tiny_json(**SIZES)
    tensors = dict(synthetic.random_tensors(ModelConfig.from_hf(config), seed=0))
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 60 * tensors[name]
    synthetic.write_tensors(folder, config, tensors)
    return folder


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 150, length).tolist()


async def generate(address: str) -> list[list[int]]:
    """The answers to all prompts, asked at once."""

    async def one(stub: Stub, length: int) -> list[int]:
        message = messages.GenerateRequest(
            request_id=f"r{length}",
            tokenized=messages.TokenizedInput(input_ids=prompt(length)),
            sampling_params=messages.SamplingParams(
                temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True
            ),
            stream=True,
        )
        replies = [reply async for reply in stub.Generate(message)]
        return [token for reply in replies[:-1] for token in reply.chunk.token_ids]

    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        return await asyncio.gather(*(one(stub, length) for length in LENGTHS))


@contextlib.contextmanager
def server(folder: Path, cache: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A server with these options, which may still be starting."""
    command = [
        *(sys.executable, "scripts/serve.py", "--model", str(folder), "--cache-dir", str(cache)),
        *("--port", "0", "--max-rows", "4", "--max-context", "512", "--num-pages", "64"),
        *("--max-prefill-tokens", "64", "--prefix-cache", "off", *options),
    ]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def answers(process: subprocess.Popen[str]) -> list[list[int]]:
    """Answers of a server, once it is ready."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready "):
            return asyncio.run(generate(line.split()[1]))
    raise AssertionError("".join(lines))


def test_kernels_and_xla_give_the_same_greedy_tokens(folder: Path, tmp_path: Path) -> None:
    with (
        server(folder, tmp_path, "--kernels=xla") as by_xla,
        server(folder, tmp_path, "--kernels=mosaic") as by_kernels,
        server(folder, tmp_path, "--kernels=mosaic", "--pdl=on") as with_pdl,
    ):
        want, got, got_with_pdl = (answers(each) for each in (by_xla, by_kernels, with_pdl))
    assert len(set(map(tuple, want))) == len(LENGTHS)
    loaded = load_folder(folder, dtype="bfloat16")
    engine = dataclasses.replace(
        loaded.engine, max_context_tokens=512, kernels=KernelSettings(implementation="xla")
    )
    loaded = dataclasses.replace(loaded, engine=engine)
    for name, answer in (("mosaic", got), ("mosaic, PDL", got_with_pdl)):
        equal = sum(map(parts_at_near_tie(loaded), LENGTHS, answer, want))
        print(f"{name}: {equal} of {len(LENGTHS)} answers of {MAX_TOKENS} tokens are equal")


def parts_at_near_tie(loaded: LoadedModel) -> Callable[[int, list[int], list[int]], bool]:
    """A check of two answers; true if they are equal."""

    def check(length: int, ours: list[int], theirs: list[int]) -> bool:
        assert len(ours) == len(theirs) == MAX_TOKENS
        if ours == theirs:
            return True
        common = next(i for i in range(MAX_TOKENS) if ours[i] != theirs[i])
        tokens = np.array(prompt(length) + theirs[:common], np.int32)
        logits = score(loaded, tokens)[-1]
        gap = abs(logits[ours[common]] - logits[theirs[common]])
        assert gap <= NEAR * np.abs(logits).max(), (length, common, gap)
        return False

    return check
