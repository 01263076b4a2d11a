"""Copies of attention pages: the valid tokens, bit by bit, in every layer position, and nothing
else of the pool."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from k3jax.compile import compile_copying
from k3jax.paged_model import PagedModel
from k3jax.program import Program
from k3jax.step import COPY_WIDTH
from serving.plan import PageCopy
from sharding.mesh import make_mesh
from tests import tiny
from tests.models import open_model, program_of

NUM_PAGES = 13
COLLECTIVES = ("all-reduce", "all-gather", "collective-permute", "all-to-all")


@functools.cache
def program(tp: int) -> Program:
    return program_of(tiny.tiny_config(), page_tokens=40, num_pages=NUM_PAGES, tp=tp)


@functools.cache
def model(tp: int) -> PagedModel:
    return open_model(program(tp), [])


@functools.cache
def compiled(tp: int) -> jax.stages.Compiled:
    return compile_copying(program(tp), make_mesh(program(tp).parallel))


def random_pool(tp: int) -> np.ndarray:
    """Random bits, the patterns of NaN among them, unequal on the ranks."""
    pool = model(tp).pool
    words = np.random.default_rng(7).integers(0, 2**16, pool.shape, np.uint16)
    words[:, :, :, ::5] = 0xFFFF
    return words


def copied(pool: np.ndarray, copies: list[PageCopy]) -> np.ndarray:
    """What the pool must hold after the copies, made one word range at a time."""
    want = pool.copy()
    for source, target, num_tokens in copies:
        want[:, :, target, :num_tokens] = pool[:, :, source, :num_tokens]
    return want


def run(tp: int, pool: np.ndarray, copies: list[PageCopy]) -> np.ndarray:
    one = model(tp)
    one.pool = jax.device_put(pool, one.pool.sharding)
    one.copy([copies])
    return np.asarray(one.pool)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "copies",
    [
        [PageCopy(3, 5, 17)],
        [PageCopy(3, 5, 1), PageCopy(3, 12, 40), PageCopy(2, 1, 39)],  # one source twice
        [PageCopy(source, source + 6, 7 * source) for source in range(1, COPY_WIDTH + 2)],
        [],
    ],
    ids=["one", "partly_filled_call", "two_calls", "none"],
)
def test_only_the_valid_tokens_of_the_targets_change(tp: int, copies: list[PageCopy]) -> None:
    pool = random_pool(tp)
    np.testing.assert_array_equal(run(tp, pool, copies), copied(pool, copies))


def test_a_call_reads_all_sources_before_it_writes() -> None:
    pool = random_pool(1)
    chain = [PageCopy(1, 2, 30), PageCopy(2, 3, 40), PageCopy(3, 1, 20)]
    np.testing.assert_array_equal(run(1, pool, chain), copied(pool, chain))


def test_every_rank_copies_its_own_shard() -> None:
    text = compiled(2).as_text()
    assert [name for name in COLLECTIVES if name in text] == []


def test_pages_on_their_way_are_those_of_one_layer_position() -> None:
    layout = program(1).layout
    one_page = layout.num_bytes // layout.num_positions // layout.num_pages
    assert compiled(1).memory_analysis().temp_size_in_bytes <= 3 * COPY_WIDTH * one_page
