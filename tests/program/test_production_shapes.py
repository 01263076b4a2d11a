"""The released K3 on abstract arrays: parameter counts, page sizes, and a step of a TP16 rank."""

from __future__ import annotations

import json
import math

import pytest
from jax.sharding import AbstractMesh, AxisType

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.compile import abstract_arguments
from k3jax.config import CacheConfig, EngineConfig, ModelConfig, validate
from k3jax.model import abstract_params
from k3jax.params import a_log_stored
from k3jax.pool import pool_layout
from k3jax.program import Program
from k3jax.step import serving_step
from pallas_kernels.kda import mosaic_decode
from serving.page_table.alignment import align
from sharding.axes import DP, TP, ParallelConfig
from tests import tiny

TEXT_PARAMETERS = 2_779_484_478_208
RELEASED = json.loads((tiny.DATA / "k3-config.json").read_text())
CFG = ModelConfig.from_hf(RELEASED)


def test_abstract_model_has_the_published_number_of_text_parameters() -> None:
    params = abstract_params(CFG, ParallelConfig(), "bfloat16")
    leaves = {f"{part}/{name}": x for part, tree in params.items() for name, x in tree.items()}
    weights_per_number = {"codes": 2, "scales": 0}
    total = sum(
        math.prod(x.shape) * weights_per_number.get(name.rsplit("_", 1)[-1], 1)
        for name, x in leaves.items()
    )
    # The file pads A_log beyond the heads; the device does not keep the padding.
    padding = len(CFG.kda_layers) * (a_log_stored(CFG) - CFG.kda_num_heads)
    assert total + padding == TEXT_PARAMETERS
    assert len(leaves) <= 128


@pytest.mark.parametrize(
    ("tp", "num_drafts", "page_tokens"), [(1, 0, 5760), (1, 7, 6144), (8, 0, 768), (8, 7, 768)]
)
def test_page_sizes_with_bfloat16_latents(tp: int, num_drafts: int, page_tokens: int) -> None:
    spec = cache_spec(CFG, tp=tp, dtype="bfloat16", num_drafts=num_drafts)
    assert align(spec).page_tokens == page_tokens


def first_layers(count: int) -> ModelConfig:
    """The released model cut to its first layers."""
    text = RELEASED["text_config"]
    attention = text["linear_attn_config"]
    cut = {
        name: [layer for layer in attention[name] if layer <= count]
        for name in ("kda_layers", "full_attn_layers")
    }
    text = text | {"num_hidden_layers": count, "linear_attn_config": attention | cut}
    return ModelConfig.from_hf(RELEASED | {"text_config": text})


@pytest.mark.parametrize("num_layers", [16, pytest.param(93, marks=pytest.mark.slow)])
def test_decode_step_of_a_tp16_rank_lowers(
    monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    monkeypatch.setattr(mosaic_decode, "require_hopper", lambda: None)
    cfg = first_layers(num_layers)
    parallel = ParallelConfig(tp=16)
    engine = EngineConfig(max_rows=8, max_context_tokens=65536)
    validate(cfg, parallel, engine)
    spec = cache_spec(cfg, tp=16, dtype="bfloat16")
    cache = CacheConfig(page_tokens=align(spec).page_tokens, num_pages=64)
    program = Program(
        cfg=cfg,
        parallel=parallel,
        layout=pool_layout(cfg, cache, spec, tp=16, dtype="bfloat16"),
        dtype="bfloat16",
        max_rows=engine.max_rows,
    )
    mesh = AbstractMesh((1, 16), (DP, TP), axis_types=(AxisType.Auto, AxisType.Auto))
    bucket = Bucket("decode", 8, 8, 16)
    traced = serving_step(program, mesh, bucket).trace(*abstract_arguments(program, mesh, bucket))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # One reduction after attention and at least one after the feed-forward network.
    assert text.count("stablehlo.all_reduce") >= 2 * cfg.num_layers
    assert "f64>" not in text
    # All KDA layers share one kernel.
    assert text.count("call @launch") == len(cfg.kda_layers)
    assert text.count("custom_call @mosaic_gpu") == 1
