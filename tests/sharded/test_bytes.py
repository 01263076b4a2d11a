"""Bytes that the compiled steps move between ranks, against closed forms.

Letters: `T` tokens of a replica, `S` rows, `H` hidden, `L` latent, `A` experts a token, `V`
vocabulary. Activations are bfloat16 (2 bytes), partial sums float32 (4 bytes).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest

from k3jax.buckets import Bucket
from k3jax.compile import abstract_arguments
from k3jax.config import ModelConfig
from k3jax.step import scoring_step, serving_step
from sharding.axes import ParallelConfig
from sharding.dispatch import default_capacity
from sharding.hlo import collectives, dot_flops
from sharding.mesh import make_mesh
from tests import tiny
from tests.models import program_of

H, L, V, A = 80, 40, 160, 3
ROUTING = A * (4 + 4)  # bytes of a token's expert ids and weights
DP, TP, RANKS = 2, 4, 8
ROWS, TOKENS = 8, 48
DECODE, PREFILL = Bucket("decode", ROWS, ROWS, 2), Bucket("prefill", TOKENS, 2, 2)
# One layer of each kind: KDA with a dense network, MLA with LatentMoE.
BOTH = tiny.tiny_config(
    packed=False, num_hidden_layers=2, hidden_size=H, routed_expert_hidden_size=L, num_experts=16,
    linear_attn_config={"kda_layers": [1], "full_attn_layers": [2]},
)  # fmt: skip
# KDA with LatentMoE alone, and the same experts at full width.
LATENT = dataclasses.replace(BOTH, num_layers=1, kda_layers=(0,), mla_layers=(), num_dense_layers=0)
FULL = dataclasses.replace(LATENT, latent_size=H, has_latent_moe=False, has_latent_norm=False)

# (layer, scope, kind, element type) -> bytes in, bytes out
Bytes = dict[tuple[int | None, str, str, str], tuple[int, int]]


@functools.cache
def texts(cfg: ModelConfig, bucket: Bucket, parallel: ParallelConfig) -> tuple[str, str]:
    """A step's program after and before optimisation; without sampling for models of one layer."""
    sizes = {field.name: getattr(parallel, field.name) for field in dataclasses.fields(parallel)}
    program = program_of(cfg, page_tokens=96, num_pages=5, dtype="bfloat16", max_rows=ROWS, **sizes)
    mesh = make_mesh(parallel)
    make_step = serving_step if cfg is BOTH else scoring_step
    lowered = make_step(program, mesh, bucket).lower(*abstract_arguments(program, mesh, bucket))
    before = lowered.as_text(dialect="hlo", debug_info=True)
    # XLA:CPU has no ragged exchange: what the program asks for has to do.
    is_ragged = parallel.dispatch == "ragged"
    return before if is_ragged else lowered.compile().as_text(), before


# Log probabilities are exchanged only in steps with rows that ask for them.
USUAL = {"logprobs": 0, "sample/logprobs": 0}


def moved(cfg: ModelConfig, bucket: Bucket, **mesh: Any) -> Bytes:
    """Everything that a step on dp2xtp4 moves between ranks."""
    after, before = texts(cfg, bucket, ParallelConfig(dp=DP, tp=TP, **mesh))
    bytes_in, bytes_out = Counter(), Counter()
    for one in collectives(after, lowered=before, trips=USUAL):
        key = (one.layer, one.scope, one.kind, one.dtype)
        bytes_in[key] += one.times * one.bytes_in
        bytes_out[key] += one.times * one.bytes_out
    return {key: (bytes_in[key], bytes_out[key]) for key in bytes_in}


def up_projection_flops(cfg: ModelConfig, bucket: Bucket, layer: int, **mesh: Any) -> int:
    """Of one rank in one layer's tail; the program has no other product there."""
    after, _ = texts(cfg, bucket, ParallelConfig(dp=DP, tp=TP, **mesh))
    return dot_flops(after, layer=layer, scope="moe/tail")[layer, "moe/tail"]


def all_reduce(size: int) -> tuple[int, int]:
    return size, size


def decode_outside_of_experts(num_layers: int) -> Bytes:
    """Embedding, attention and head of a decode step."""
    sizes: Bytes = {
        (None, "embed", "all-reduce", "bf16"): all_reduce(2 * ROWS * H),
        (None, "head", "all-gather", "f32"): (4 * ROWS * V // TP, 4 * ROWS * V),
    }
    for layer in range(num_layers):
        sizes[layer, "attention/sum", "all-reduce", "f32"] = all_reduce(4 * ROWS * H)
    return sizes


def tail(form: str, layer: int) -> Bytes:
    place = (layer, "moe/tail")
    if form == "columns":
        return {
            (*place, "all-reduce", "f32"): all_reduce(4 * ROWS * L),
            (*place, "reduce-scatter", "f32"): (4 * ROWS * H, 4 * ROWS * H // TP),
            (*place, "all-gather", "bf16"): (2 * ROWS * H // TP, 2 * ROWS * H),
        }
    return {(*place, "all-reduce", "f32"): all_reduce(4 * ROWS * (L + H))}


def exchanged(form: str, layer: int, tokens: int, ranks: int) -> Bytes:
    """Dispatch and combine of one layer, with `tokens` of each rank."""
    token = 2 * L + ROUTING
    there, back = (layer, "moe/experts/dispatch"), (layer, "moe/experts/combine")
    everyone = tokens * ranks
    if form == "all_gather":
        return {
            (*there, "all-gather", "u16"): (tokens * token, everyone * token),
            (*back, "reduce-scatter", "f32"): (everyone * L * 4, tokens * L * 4),
        }
    places = everyone if form == "ragged" else ranks * default_capacity(tokens, ranks, A)
    kind = "ragged-all-to-all" if form == "ragged" else "all-to-all"
    sizes: Bytes = {
        (*there, kind, "u16"): all_reduce(places * token),
        (*back, kind, "f32"): all_reduce(places * L * 4),
    }
    if form == "ragged":  # how much goes where
        sizes[layer, "moe/experts", "all-to-all", "s32"] = all_reduce(ranks * 4)
    return sizes


def result(rows: int) -> Bytes:
    """Sampled ids, their flags and the load of each rank, from every replica."""
    size = 4 * (2 * rows + RANKS)
    return {(None, "result", "all-gather", "s32"): (size, DP * size)}


def test_a_decode_step() -> None:
    expected = decode_outside_of_experts(2) | result(ROWS)
    expected[0, "dense", "all-reduce", "f32"] = all_reduce(4 * ROWS * H)
    expected |= tail("all_reduce", 1) | exchanged("all_gather", 1, ROWS, DP)
    mesh = {"dispatch": "all_gather", "tail": "all_reduce"}
    assert moved(BOTH, DECODE, **mesh) == expected
    assert up_projection_flops(BOTH, DECODE, 1, **mesh) == 2 * ROWS * L * H


MESHES = {
    "all_gather": {"dispatch": "all_gather", "tail": "folded", "experts": "tp"},
    "all_to_all": {"dispatch": "all_to_all", "tail": "columns", "experts": "ep"},
    "ragged": {"dispatch": "ragged", "tail": "all_reduce", "experts": "ep"},
}


@pytest.mark.parametrize("form", MESHES)
def test_forms_of_dispatch_and_tail(form: str) -> None:
    mesh = MESHES[form]
    expected = decode_outside_of_experts(1) | tail(mesh["tail"], 0)
    assert moved(LATENT, DECODE, **mesh) == expected | exchanged(form, 0, ROWS, DP)


@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
def test_column_tails_do_their_share_of_the_up_projection(form: str) -> None:
    assert up_projection_flops(LATENT, DECODE, 0, **MESHES[form]) == 2 * ROWS * L * H // TP


@pytest.mark.parametrize("form", MESHES)
def test_latents_are_exactly_half_of_what_the_same_experts_move_at_full_width(form: str) -> None:
    def exchange(cfg: ModelConfig, width: int) -> Bytes:
        """Experts' inputs and results, without the ids and weights that go with the inputs."""
        sizes: Bytes = {}
        for key, size in moved(cfg, DECODE, **MESHES[form]).items():
            if key[1] == "moe/experts/dispatch":
                places = [one // (2 * width + ROUTING) for one in size]
                assert [one * (2 * width + ROUTING) for one in places] == list(size)
                sizes[key] = (size[0] - places[0] * ROUTING, size[1] - places[1] * ROUTING)
            elif key[1] == "moe/experts/combine":
                sizes[key] = size
        return sizes

    latent, full = exchange(LATENT, L), exchange(FULL, H)
    assert len(latent) == 2
    assert full == {key: (2 * there, 2 * back) for key, (there, back) in latent.items()}


def test_a_prefill_step_with_sharded_tokens() -> None:
    mesh = {"dispatch": "all_gather", "shard_tokens": "on"}
    own, rows = TOKENS // TP, PREFILL.rows
    expected = result(rows) | exchanged("all_gather", 1, own, RANKS)
    expected |= {
        (None, "embed", "reduce-scatter", "bf16"): (2 * TOKENS * H, 2 * own * H),
        (None, "load", "all-reduce", "s32"): all_reduce(4 * RANKS),
        (None, "head", "all-reduce", "bf16"): all_reduce(2 * rows * H),
        (None, "head", "all-gather", "f32"): (4 * rows * V // TP, 4 * rows * V),
    }
    for layer, gather, scatter in (
        (0, "attention/gather", "attention/sum"),
        (0, "dense", "dense"),
        (1, "attention/gather", "attention/sum"),
        (1, "moe/shared", "moe/shared"),
    ):
        expected[layer, gather, "all-gather", "bf16"] = (2 * own * H, 2 * TOKENS * H)
        expected[layer, scatter, "reduce-scatter", "f32"] = (4 * TOKENS * H, 4 * own * H)
    assert moved(BOTH, PREFILL, **mesh) == expected
    # Each rank projects its own tokens up.
    assert up_projection_flops(BOTH, PREFILL, 1, **mesh) == 2 * own * L * H
