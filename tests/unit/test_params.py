"""The described parameters: K3's published totals, sources that cover every leaf exactly once."""

import json
import math

import jax
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.params import a_log_stored, describe, num_parameters
from k3jax.weights.names import num_leading_dims, stored_shapes
from k3jax.weights.plan import numpy_dtype
from tests.tiny import DATA, tiny_config

MAX_LEAVES = 128


@pytest.fixture(scope="module")
def k3() -> ModelConfig:
    return ModelConfig.from_hf(json.loads((DATA / "k3-config.json").read_text()))


def golden(name: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((DATA / name / "config.json").read_text()))


def abstract_tree(cfg: ModelConfig) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    return {
        module: {
            name: jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec, "bfloat16"))
            for name, spec in params.items()
        }
        for module, params in describe(cfg).items()
    }


def test_k3_has_the_published_number_of_parameters(k3):
    assert num_parameters(k3) == 2_779_484_478_208


def test_k3_has_the_published_number_of_text_bytes(k3):
    # 1,560,860,324,864 bytes in all, less the 447,358,976 bf16 parameters of the vision tower and
    # its projector.
    tree = abstract_tree(k3)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    padding = len(k3.kda_layers) * (a_log_stored(k3) - k3.kda_num_heads) * 4
    assert total + padding == 1_560_860_324_864 - 2 * 447_358_976


def test_k3_fits_the_leaf_budget(k3):
    assert len(jax.tree.leaves(abstract_tree(k3))) == 42 <= MAX_LEAVES


def test_k3_layer_map(k3):
    assert k3.mla_layers == (*range(3, 88, 4), 91, 92)
    assert len(k3.kda_layers) == 69
    assert k3.dense_layers == (0,)
    assert k3.moe_layers == tuple(range(1, 93))
    assert [layer for layer in range(93) if layer % k3.attn_res_block_layers == 0] == [
        0, 12, 24, 36, 48, 60, 72, 84,
    ]  # fmt: skip


def test_k3_a_log_is_stored_longer_than_its_heads(k3):
    assert (k3.kda_num_heads, a_log_stored(k3)) == (96, 128)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight_packed", (3072, 1792)),
        ("layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight_scale", (3072, 112)),
        ("layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight_packed", (3584, 1536)),
        ("layers.{layer}.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168)),
        ("layers.{layer}.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168)),
        ("layers.{layer}.self_attn.q_conv1d.weight", (12288, 1, 4)),
        ("layers.{layer}.self_attn.A_log", (128,)),
        ("layers.{layer}.self_attn.q_b_proj.weight", (18432, 1536)),
        ("layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("layers.{layer}.self_attn.kv_b_proj.weight", (24576, 512)),
        ("layers.{layer}.mlp_res_proj.weight", (1, 7168)),
        ("lm_head.weight", (163840, 7168)),
    ],
)
def test_k3_stored_shapes_are_the_released_ones(k3, name: str, shape: tuple[int, ...]):
    found = [
        stored_shapes(spec, source, k3)[0]
        for params in describe(k3).values()
        for spec in params.values()
        for source in spec.sources
        if source.name == name
    ]
    assert found == [shape]


def test_k3_is_stored_in_the_published_number_of_tensors(k3):
    count = sum(
        len(spec.layers or (0,)) * (k3.num_experts if None in source.index else 1)
        for params in describe(k3).values()
        for spec in params.values()
        for source in spec.sources
    )
    assert count == 497_220 - 165 - 3  # the vision tower and its projector are skipped


@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param(tiny_config(), id="tiny"),
        pytest.param(tiny_config(packed=False), id="tiny-dense-experts"),
        pytest.param(golden("k3-tiny"), id="k3-tiny"),
        pytest.param(golden("kimi-linear-tiny"), id="kimi-linear-tiny"),
    ],
)
def test_sources_cover_every_leaf_exactly_once(cfg: ModelConfig):
    for module, params in describe(cfg).items():
        for name, spec in params.items():
            inside = spec.shape[bool(spec.layers) : num_leading_dims(spec)]
            filled = np.zeros(inside, np.int32)
            for source in spec.sources:
                filled[tuple(slice(None) if part is None else part for part in source.index)] += 1
            assert (filled == 1).all(), f"{module}.{name}"
            assert len(spec.axes) == len(spec.shape), f"{module}.{name}"


def test_no_two_sources_share_a_tensor(k3):
    names = [
        (source.name, layer)
        for params in describe(k3).values()
        for spec in params.values()
        for source in spec.sources
        for layer in spec.layers or (None,)
    ]
    assert len(names) == len(set(names))


def test_packed_and_dense_experts_have_the_same_number_of_parameters():
    assert num_parameters(tiny_config(packed=True)) == num_parameters(tiny_config(packed=False))


def test_parameter_count_is_the_sum_of_stored_elements():
    cfg = golden("kimi-linear-tiny")
    sizes = [math.prod(s.shape) for params in describe(cfg).values() for s in params.values()]
    assert num_parameters(cfg) == sum(sizes)
