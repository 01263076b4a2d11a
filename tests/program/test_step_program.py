"""The compiled programs: in place, few arguments, no float64, and nothing compiled after
warm-up."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.compile import (
    CompileCounter,
    abstract_arguments,
    compile_clearing,
    compile_copying,
)
from k3jax.program import Program
from k3jax.step import serving_step
from sharding.mesh import make_mesh
from tests import tiny
from tests.models import program_of

NUM_PAGES = 9973  # a prime, so that no other array has this dim
PREFILL, DECODE = Bucket("prefill", 48, 2, 2), Bucket("decode", 2, 2, 2)


@functools.cache
def program() -> Program:
    return program_of(tiny.tiny_config(), page_tokens=40, num_pages=NUM_PAGES)


@functools.cache
def compiled(bucket: Bucket) -> jax.stages.Compiled:
    mesh = make_mesh(program().parallel)
    arguments = abstract_arguments(program(), mesh, bucket)
    return serving_step(program(), mesh, bucket).lower(*arguments).compile()


@functools.cache
def clearing() -> jax.stages.Compiled:
    return compile_clearing(program(), make_mesh(program().parallel))


@functools.cache
def copying() -> jax.stages.Compiled:
    return compile_copying(program(), make_mesh(program().parallel))


PROGRAMS = {
    "prefill": functools.partial(compiled, PREFILL),
    "decode": functools.partial(compiled, DECODE),
    "clear": clearing,
    "copy": copying,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_pool_is_donated_and_never_copied(name: str) -> None:
    memory = PROGRAMS[name]().memory_analysis()
    one_position = program().layout.num_bytes // program().layout.num_positions
    assert memory.alias_size_in_bytes >= program().layout.num_bytes
    assert memory.temp_size_in_bytes < one_position
    copies = re.findall(
        rf"= u16\[[0-9,]*{NUM_PAGES}[0-9,]*\]\S* copy\(", PROGRAMS[name]().as_text()
    )
    assert copies == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_float64_anywhere(name: str) -> None:
    assert "f64[" not in PROGRAMS[name]().as_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_kf_k10_no_host_callback(name: str) -> None:
    assert 'custom_call_target="xla_python' not in PROGRAMS[name]().as_text()


def test_step_has_few_arguments() -> None:
    mesh = make_mesh(program().parallel)
    assert len(jax.tree.leaves(abstract_arguments(program(), mesh, DECODE))) <= 128


def test_pool_stays_in_the_same_buffer_and_old_handle_dies() -> None:
    step = compiled(DECODE)
    mesh = make_mesh(program().parallel)
    params, pool, tokens, packed = (
        jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), part)
        for part in abstract_arguments(program(), mesh, DECODE)
    )
    before = pool.addressable_shards[0].data.unsafe_buffer_pointer()
    new_pool, _, _ = step(params, pool, tokens, np.asarray(packed))
    after = new_pool.addressable_shards[0].data.unsafe_buffer_pointer()
    assert before == after
    assert pool.is_deleted()


def test_compile_counter_counts_what_it_should() -> None:
    counter = CompileCounter()
    jax.jit(lambda x: x * 3.0 + 41.0)(np.float32(1.0))
    assert counter.count == 1
    compiled(DECODE)  # cached by this module: compiles nothing
