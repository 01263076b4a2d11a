"""One model on several meshes: the split changes nothing but rounding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.config import ConfigError, EngineConfig, ModelConfig, validate
from k3jax.paged_model import PagedModel
from k3jax.params import describe
from pallas_kernels.settings import KernelSettings
from sharding.axes import ParallelConfig, parse_mesh
from sharding.mesh import make_mesh
from sharding.specs import local_shape, partition_spec
from tests import ragged, tiny
from tests.models import Row, open_model, program_of, relative_error, run_replicas

PREFILL, DECODE = Bucket("prefill", 40, 2, 2), Bucket("decode", 2, 2, 2)
TOLERANCE = 2e-5
LENGTHS = (23, 16, 9)


def config(*, packed: bool) -> ModelConfig:
    """A tiny model whose heads, columns and experts divide by eight: KDA dense, KDA, MLA."""
    attention = {"num_heads": 8, "head_dim": 6, "kda_layers": [1, 2], "full_attn_layers": [3]}
    return tiny.tiny_config(
        packed=packed, num_experts=16, num_hidden_layers=3, routed_scaling_factor=2.5,
        linear_attn_config=attention,
    )  # fmt: skip


def rows_of(model: PagedModel) -> list[Row]:
    """Sequences for one replica, on pages and a slot of their own."""
    rng = np.random.default_rng(5)
    groups = model.program.num_recurrent_groups
    rows = []
    for index, length in enumerate(LENGTHS):
        pages = tuple(range(1 + 5 * index, 6 + 5 * index))
        tokens = rng.integers(0, model.program.cfg.vocab_size, length).astype(np.int32)
        rows.append(Row(tokens, attention=pages[:2], states=pages[2 : 2 + groups], slot=index))
    return rows


def run(model: PagedModel, placing: Sequence[Sequence[int]]) -> dict[int, np.ndarray]:
    """Logits of each sequence, by its index: a prefill, and a decode step of the last token.

    Args:
      placing: sequences of each replica, at most two; a replica without any is idle.
    """
    rows = rows_of(model)

    def step(bucket: Bucket, start: int, end: int) -> dict[int, np.ndarray]:
        parts = [
            [(rows[i], start % len(rows[i].tokens), len(rows[i].tokens) + end) for i in indices]
            for indices in placing
        ]
        results = run_replicas(model, bucket, parts)
        return {
            i: result
            for indices, replica in zip(placing, results, strict=True)
            for i, result in zip(indices, replica, strict=True)
        }

    prefill, decode = step(PREFILL, 0, -1), step(DECODE, -1, 0)
    return {i: np.concatenate([prefill[i], decode[i]]) for i in prefill}


@functools.cache
def model_on(packed: bool, **mesh: Any) -> PagedModel:
    program = program_of(config(packed=packed), page_tokens=40, num_pages=16, **mesh)
    return open_model(program, [PREFILL, DECODE])


@functools.cache
def expected(packed: bool) -> dict[int, np.ndarray]:
    """Each sequence alone, on one device."""
    model = model_on(packed)
    return {i: run(model, [[i]])[i] for i in range(len(LENGTHS))}


@pytest.mark.parametrize(
    ("packed", "placing", "mesh"),
    [
        pytest.param(True, [[0, 1]], {"tp": 8, "tail": "columns"}, marks=pytest.mark.slow),
        (False, [[0, 2], []], {"dp": 2, "tp": 4, "dispatch": "all_to_all", "tail": "columns"}),
        pytest.param(
            False,
            [[2], [], [1], [], [], [], [0], []],
            {"dp": 8, "dispatch": "ragged"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp8", "dp2xtp4", "dp8"],
)
def test_kf_m10_logits_do_not_depend_on_the_mesh(
    packed: bool,
    placing: list[list[int]],
    mesh: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ragged.emulate_on_cpu(monkeypatch)
    got = run(model_on(packed, **mesh), placing)
    assert sorted(got) == sorted(i for indices in placing for i in indices)
    for i, logits in got.items():
        assert relative_error(logits, expected(packed)[i]) <= TOLERANCE


def test_the_fused_tail_is_the_kernel_or_what_stands_in_for_it() -> None:
    """On a CPU the operator's reference; no other implementation takes the kernel's place."""
    program = program_of(config(packed=False), page_tokens=40, num_pages=16, tp=2, tail="fused")
    reference = KernelSettings(implementation="reference")
    model = open_model(dataclasses.replace(program, kernels=reference), [PREFILL, DECODE])
    got = run(model, [[0, 1]])
    for i, logits in got.items():
        assert relative_error(logits, expected(False)[i]) <= TOLERANCE
    if jax.default_backend() == "cpu":
        with pytest.raises(ConfigError, match=r"decode step: moe_tail: .*not a Hopper GPU"):
            open_model(program, [DECODE])


ENGINE = EngineConfig(max_context_tokens=512)


def problems(
    parallel: ParallelConfig, *, packed: bool = True, engine: EngineConfig = ENGINE
) -> dict[str, str]:
    """Everything that `validate` finds: what it names first, and what it expects."""
    try:
        validate(config(packed=packed), parallel, engine)
    except ConfigError as error:
        return {text.split(":")[0]: text for text in error.problems}
    return {}


def test_a_mesh_that_does_not_divide_lists_every_problem() -> None:
    found = problems(
        ParallelConfig(dp=2, tp=3, tail="columns", shard_tokens="on"),
        engine=EngineConfig(max_context_tokens=513),
    )
    assert list(found) == [
        "num_attention_heads does not divide over the mesh",
        "linear_attn_config.num_heads does not divide over the mesh",
        "vocab_size does not divide over the mesh",
        "intermediate_size does not divide over the mesh",
        "num_experts does not divide over the mesh",
        "hidden_size does not divide over the mesh",
        "tokens of a prefill step do not divide over the mesh",
        "max_context_tokens is beyond the model",
    ]
    assert found["vocab_size does not divide over the mesh"].endswith("expected a multiple of tp3")
    assert found["num_experts does not divide over the mesh"].endswith(
        "got 16; expected a multiple of dp2 x tp3 = 6"
    )


def test_the_fused_tail_needs_a_norm_of_the_latents() -> None:
    cfg = dataclasses.replace(config(packed=True), has_latent_norm=False)
    with pytest.raises(ConfigError, match="got 'fused' and latent_moe_use_norm false"):
        validate(cfg, ParallelConfig(tp=2, tail="fused"), ENGINE)
    validate(cfg, ParallelConfig(tp=2, tail="folded"), ENGINE)


def test_kf_v18_the_output_layer_has_the_ids_of_the_vocabulary_and_no_more() -> None:
    cfg = dataclasses.replace(config(packed=True), vocab_size=164)
    assert describe(cfg)["top"]["lm_head"].shape[0] == 164
    with pytest.raises(ConfigError, match=r"vocab_size does not divide.*: got 164"):
        validate(cfg, ParallelConfig(tp=8), ENGINE)


@pytest.mark.parametrize(
    ("parallel", "packed", "problem"),
    [
        (ParallelConfig(dp=2, tp=8), True, None),
        (ParallelConfig(dp=16, tp=1), True, None),
        (ParallelConfig(dp=4, tp=8), True, "got 16; expected a multiple of dp4 x tp8 = 32"),
        (ParallelConfig(dp=4, tp=8), False, "a multiple of dp4 x tp8 = 32, or experts 'tp'"),
        (ParallelConfig(dp=4, tp=8, experts="tp"), False, None),
        (ParallelConfig(dp=3, experts="tp"), False, "got 32; expected a multiple of dp3 x tp1 = 3"),
        (ParallelConfig(dp=2, experts="tp"), True, "of 32 x dp2 x tp1 = 64, or experts 'ep'"),
        (ParallelConfig(tp=8, tail="folded", shard_tokens="on"), True, None),
    ],
    ids=str,
)
def test_experts_divide_over_all_ranks(
    parallel: ParallelConfig, packed: bool, problem: str | None
) -> None:
    found = list(problems(parallel, packed=packed).values())
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_tokens_of_every_prefill_step_divide_if_they_must() -> None:
    # Steps of 64 and of 100 tokens.
    engine = EngineConfig(max_context_tokens=512, max_prefill_tokens=100)
    assert problems(ParallelConfig(tp=8), engine=engine) == {}
    (text,) = problems(ParallelConfig(tp=8, shard_tokens="on"), engine=engine).values()
    assert "got 100, with max_prefill_tokens 100; expected a multiple of tp8" in text
    engine = EngineConfig(max_context_tokens=512, max_prefill_tokens=96)
    assert problems(ParallelConfig(tp=8, shard_tokens="on"), engine=engine) == {}


def test_too_few_devices() -> None:
    with pytest.raises(ValueError, match="got 8 cpu devices; expected 16"):
        make_mesh(ParallelConfig(tp=16))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("tp8", (1, 8)), ("dp2xtp4", (2, 4)), ("tp4xdp2", (2, 4)), ("dp8", (8, 1))],
)
def test_mesh_notation(text: str, sizes: tuple[int, int]) -> None:
    assert parse_mesh(text) == {"dp": sizes[0], "tp": sizes[1]}


@pytest.mark.parametrize("text", ["", "tp", "tp0", "tp-1", "ep4", "tp2xtp4", "tp2x", "8", "TP8"])
def test_mesh_notation_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mesh is not understood"):
        parse_mesh(text)


def test_two_dims_on_one_mesh_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh axis 'tp' would split two dims"):
        partition_spec(("heads", "vocab"), ParallelConfig(tp=2))


def test_local_shape_of_a_dim_that_does_not_divide_is_refused() -> None:
    assert local_shape((6, 8), (None, "heads"), ParallelConfig(tp=4)) == (6, 2)
    with pytest.raises(ValueError, match="got 6 of"):
        local_shape((6, 8), ("heads", None), ParallelConfig(tp=4))
