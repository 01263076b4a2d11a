"""Page sizes of Kimi K3 against cache-semantics.md section 1, and of made-up caches by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3jax.cache_spec import CacheSpec, LayerGroup, cache_spec
from k3jax.config import ConfigError, ModelConfig
from serving.page_table import align, capacity, lcm_page, pages_in, report

K3_CONFIG = Path(__file__).parents[1] / "data" / "k3-config.json"
K3_CHANNELS = 96 * 128
BF16, FP8, FP32 = 2, 1, 4


def k3_spec(*, tp: int, latent: int = BF16, state: int = FP32, drafts: int = 0) -> CacheSpec:
    """K3's cache on one of `tp` ranks, with any number of bytes per latent and state number."""
    groups = [LayerGroup(kind="recurrent", layers=tuple(range(23))) for _ in range(3)]
    return CacheSpec(
        groups=(*groups, LayerGroup(kind="attention", layers=tuple(range(24)))),
        token_bytes=576 * latent,
        conv_bytes=(3 + drafts) * 3 * K3_CHANNELS // tp * BF16,
        recurrent_bytes=K3_CHANNELS // tp * 128 * state,
    )


def small_spec(*, token_bytes: int = 4, state_bytes: int = 100, recurrent: int = 1) -> CacheSpec:
    groups = [LayerGroup(kind="recurrent", layers=(i,)) for i in range(recurrent)]
    return CacheSpec(
        groups=(*groups, LayerGroup(kind="attention", layers=(recurrent,))),
        token_bytes=token_bytes,
        conv_bytes=0,
        recurrent_bytes=state_bytes,
    )


@pytest.mark.parametrize(
    ("spec", "state_bytes", "page_tokens", "page_bytes", "padding_percent"),
    [
        (k3_spec(tp=1), 6512640, 5760, 6635520, 1.9),
        (k3_spec(tp=1, latent=FP8), 6512640, 11392, 6561792, 0.8),
        (k3_spec(tp=2), 3256320, 2944, 3391488, 4.2),
        (k3_spec(tp=2, latent=FP8), 3256320, 5760, 3317760, 1.9),
        (k3_spec(tp=4), 1628160, 1536, 1769472, 8.7),
        (k3_spec(tp=4, latent=FP8), 1628160, 2944, 1695744, 4.2),
        (k3_spec(tp=8), 814080, 768, 884736, 8.7),
        (k3_spec(tp=8, latent=FP8), 814080, 1536, 884736, 8.7),
        (k3_spec(tp=16), 407040, 384, 442368, 8.7),
        (k3_spec(tp=16, latent=FP8), 407040, 768, 442368, 8.7),
        (k3_spec(tp=8, latent=FP8, state=BF16), 420864, 768, 442368, 5.1),
        (k3_spec(tp=16, state=BF16), 210432, 256, 294912, 40.1),
        (k3_spec(tp=8, latent=FP8, drafts=8), 887808, 1664, 958464, 8.0),
        (k3_spec(tp=16, drafts=8), 443904, 512, 589824, 32.9),
        (k3_spec(tp=1, drafts=7), 7028736, 6144, 7077888, 0.7),
    ],
)
def test_k3_pages_have_the_documented_size(
    spec: CacheSpec, state_bytes: int, page_tokens: int, page_bytes: int, padding_percent: float
):
    geometry = align(spec)
    assert geometry.state_bytes == state_bytes
    assert geometry.page_tokens == page_tokens
    assert geometry.page_bytes == page_bytes
    assert geometry.state_padding_bytes == page_bytes - state_bytes
    assert geometry.state_padding_percent == pytest.approx(padding_percent, abs=0.05)


@pytest.mark.parametrize(
    ("tp", "num_drafts", "page_tokens"), [(1, 0, 5760), (1, 7, 6144), (8, 0, 768)]
)
def test_the_released_configuration_gives_the_documented_pages(
    tp: int, num_drafts: int, page_tokens: int
):
    cfg = ModelConfig.from_hf(json.loads(K3_CONFIG.read_text()))
    geometry = align(cache_spec(cfg, tp=tp, dtype="bfloat16", num_drafts=num_drafts))
    assert geometry.page_tokens == page_tokens
    assert geometry.num_positions == 24
    assert geometry.num_state_pages == 3
    assert geometry.num_state_layers == 69
    assert geometry.unused_state_positions == 3


def test_one_page_number_owns_a_page_in_every_layer_position():
    assert align(k3_spec(tp=8)).slab_bytes == 24 * 884736 == 21233664


def test_page_words_hold_the_entries_exactly_and_the_state():
    geometry = align(k3_spec(tp=8))
    assert geometry.page_words == geometry.page_tokens * 576
    assert geometry.page_words >= geometry.state_bytes // 2


@pytest.mark.parametrize(
    ("options", "page_tokens"),
    [
        ({"kernel_tokens": 1, "unit_tokens": 1}, 25),  # 100 / 4 exactly
        ({"kernel_tokens": 8, "unit_tokens": 1}, 32),  # the kernel block is the unit
        ({"kernel_tokens": 8, "unit_tokens": 12}, 40),  # 3 units of 12, then a multiple of 8
        ({"kernel_tokens": 1, "unit_tokens": 1, "block_tokens": 10}, 30),
        ({"kernel_tokens": 1, "unit_tokens": 20, "block_tokens": 10}, 40),  # smaller than the unit
        ({"kernel_tokens": 1, "unit_tokens": 6, "export_tokens": 4}, 36),  # lcm(6, 4) = 12
    ],
)
def test_page_tokens_follow_each_step(options: dict[str, int], page_tokens: int):
    assert align(small_spec(), **options).page_tokens == page_tokens


def test_a_state_of_a_page_exactly_needs_no_padding():
    geometry = align(small_spec(token_bytes=4, state_bytes=64), kernel_tokens=16, unit_tokens=16)
    assert geometry.page_tokens == 16
    assert geometry.state_padding_bytes == 0


def test_a_model_without_recurrent_layers_has_pages_of_one_unit():
    geometry = align(small_spec(recurrent=0))
    assert geometry.page_tokens == 128
    assert geometry.num_state_pages == geometry.state_bytes == geometry.state_padding_bytes == 0
    assert geometry.state_padding_percent == 0.0


def test_sizes_that_make_no_sense_are_reported_together():
    spec = small_spec(token_bytes=3, state_bytes=101)
    with pytest.raises(ConfigError) as raised:
        align(spec, unit_tokens=0, block_tokens=-1)
    assert raised.value.problems == (
        "unit_tokens is out of range: got 0; expected >= 1",
        "block_tokens is out of range: got -1; expected >= 1",
        "token_bytes is not whole 16-bit words: got 3; expected an even number",
        "state_bytes is not whole 16-bit words: got 101; expected an even number",
    )


@pytest.mark.parametrize(
    ("num_tokens", "attention_pages"), [(0, 0), (1, 1), (768, 1), (769, 2), (1_000_000, 1303)]
)
def test_request_pages_are_attention_pages_and_one_page_a_recurrent_group(
    num_tokens: int, attention_pages: int
):
    geometry = align(k3_spec(tp=8))
    assert geometry.attention_pages(num_tokens) == attention_pages
    assert geometry.request_pages(num_tokens) == attention_pages + 3


def test_capacity_counts_the_null_page_out():
    geometry = align(k3_spec(tp=8))
    held = capacity(geometry, 9)
    assert held.usable_pages == 8
    assert held.total_bytes == 9 * 21233664
    assert held.tokens == 5 * 768
    assert held.requests == 2


def test_a_pool_for_one_page_of_one_request_is_the_smallest():
    geometry = align(k3_spec(tp=8))
    assert capacity(geometry, 5).requests == 1
    with pytest.raises(ConfigError, match=r"num_pages is too small: got 4; expected >= 5"):
        capacity(geometry, 4)


def test_pages_in_a_budget_of_bytes():
    geometry = align(k3_spec(tp=8))
    assert pages_in(geometry, 10 * 21233664 - 1) == 9
    assert pages_in(geometry, 10 * 21233664) == 10


def test_the_report_names_sizes_padding_and_capacity():
    assert report(align(k3_spec(tp=8)), 101).splitlines() == [
        "page: 768 tokens x 1,152 B = 884,736 B in each of 24 layer positions",
        "state: 814,080 B + 70,656 B padding (8.7 %), 3 pages a request, which leave 3 of 72 layer "
        "positions unused",
        "pool: 101 pages (one is the null page) = 2,144,600,064 B; holds 74,496 tokens of one "
        "request, or 25 requests of up to 768 tokens",
    ]


def test_the_report_of_a_model_without_state_has_no_state_line():
    assert "state" not in report(align(small_spec(recurrent=0)), 10)


def test_lcm_of_one_two_and_three_kilobytes_is_six():
    large = lcm_page({"a": 1024, "b": 2048, "c": 3072})
    assert large.page_bytes == 6 * 1024
    assert large.counts == {"a": 6, "b": 3, "c": 2}


def test_lcm_of_k3_states_and_tokens():
    large = lcm_page({"state": 814080, "token": 576})
    assert large.page_bytes == 2442240
    assert large.counts == {"state": 3, "token": 4240}


def test_lcm_refuses_what_has_no_multiple():
    with pytest.raises(ConfigError, match="sizes is empty"):
        lcm_page({})
    with pytest.raises(ConfigError, match="b is out of range: got 0; expected >= 1"):
        lcm_page({"a": 1, "b": 0})
