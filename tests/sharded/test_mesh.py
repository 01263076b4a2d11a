"""One model on several meshes: the split changes nothing but rounding."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.config import ConfigError, EngineConfig, ModelConfig, validate
from k3jax.paged_model import PagedModel
from sharding.axes import ParallelConfig, parse_mesh
from sharding.mesh import make_mesh
from sharding.specs import local_shape, partition_spec
from tests import tiny
from tests.models import Row, open_model, program_of, relative_error, run_rows

PREFILL, DECODE = Bucket("prefill", 40, 2, 2), Bucket("decode", 2, 2, 2)
TOLERANCE = 2e-5


def config(*, packed: bool) -> ModelConfig:
    """A tiny model whose heads, columns and experts divide by eight."""
    return tiny.tiny_config(
        packed=packed, num_experts=16, linear_attn_config={"num_heads": 8, "head_dim": 6}
    )


def run(model: PagedModel) -> np.ndarray:
    """Logits of two rows: a prefill, and a decode step after it."""
    rng = np.random.default_rng(5)
    groups = model.program.num_recurrent_groups
    rows = []
    for index, length in enumerate((23, 16)):
        pages = tuple(range(1 + 5 * index, 6 + 5 * index))
        tokens = rng.integers(0, model.program.cfg.vocab_size, length).astype(np.int32)
        rows.append(Row(tokens, attention=pages[:2], states=pages[2 : 2 + groups], slot=index))
    ends = [len(row.tokens) - 1 for row in rows]
    parts = run_rows(model, PREFILL, [(row, 0, end) for row, end in zip(rows, ends, strict=True)])
    parts += run_rows(
        model, DECODE, [(row, end, end + 1) for row, end in zip(rows, ends, strict=True)]
    )
    return np.concatenate(parts)


@functools.cache
def logits(tp: int, experts: Literal["ep", "tp"], packed: bool) -> np.ndarray:
    program = program_of(
        config(packed=packed), page_tokens=40, num_pages=11, tp=tp, experts=experts
    )
    return run(open_model(program, [PREFILL, DECODE]))


@pytest.mark.parametrize(("tp", "experts", "packed"), [(8, "ep", True), (2, "tp", False)], ids=str)
def test_logits_do_not_depend_on_the_mesh(
    tp: int, experts: Literal["ep", "tp"], packed: bool
) -> None:
    assert relative_error(logits(tp, experts, packed), logits(1, "ep", packed)) <= TOLERANCE


def test_a_mesh_that_does_not_divide_lists_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config(packed=True), ParallelConfig(tp=3), EngineConfig(max_context_tokens=512))
    text = str(caught.value)
    for name in (
        "num_attention_heads",
        "linear_attn_config.num_heads",
        "vocab_size",
        "num_experts",
    ):
        assert name in text
    assert "tp3" in text


def test_experts_split_inside_need_whole_mxfp4_groups() -> None:
    parallel = ParallelConfig(tp=2, experts="tp")
    with pytest.raises(ConfigError, match="MXFP4 groups on every rank: got 32"):
        validate(config(packed=True), parallel, EngineConfig(max_context_tokens=512))


def test_dp_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="dp is not supported yet: got dp2"):
        validate(config(packed=True), ParallelConfig(dp=2), EngineConfig(max_context_tokens=512))


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
