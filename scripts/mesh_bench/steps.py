"""Steps of a truncated K3 through the server's own programs: decode and prefill.

Three truncations differ by one layer, so their differences are the time of a KDA layer and of an
MLA layer, both with their experts. A longer model has as many layers as fit. Weights and cache are
random. Values are not compared with a
dense computation here, which the tests do: a step must be finite, send every token to its experts,
and its greedy ids are recorded so that layouts and forms can be compared.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int32
from mesh_bench.arrays import Leaf, fill, normal, unit
from mesh_bench.experts import random_codes, random_scales
from mesh_bench.groups import FUSED, FUSED_TOKENS, TAIL_FORMS, Group, Sizes, text_config
from mesh_bench.record import Recorder
from mesh_bench.timing import WrongResult, sample

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.config import CacheConfig, ModelConfig
from k3jax.inputs import empty_inputs, pack
from k3jax.paged_model import PagedModel
from k3jax.param_spec import ParamSpec
from k3jax.params import describe
from k3jax.pool import abstract_pool, pool_layout
from k3jax.program import Program
from k3jax.results import unpack
from k3jax.step import serving_step
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh

_CONFIG = Path(__file__).parents[2] / "tests" / "data" / "k3-config.json"
_DTYPE = "bfloat16"
_RECORDED_IDS = 64
_MOST_OF_MEMORY = 0.85  # for weights and cache; the rest is work space


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Steps that share one configuration of the mesh.

    Attributes:
      label: what distinguishes it from others, in the names of its cases.
    """

    label: str
    parallel: ParallelConfig
    buckets: tuple[Bucket, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncation:
    """A model of a few layers, on the mesh."""

    layers: str
    program: Program
    mesh: Mesh
    params: Mapping[str, Mapping[str, Any]]


def run(recorder: Recorder, group: Group) -> None:
    """Time the steps of a group, one truncation after the other."""
    sizes = recorder.sizes
    parallel = ParallelConfig(tp=group.num_devices)
    mesh = make_mesh(parallel)
    if group.section == "model":
        truncations = [longest(sizes, parallel, mesh, group.most_layers)]
    elif group.form is not None:
        truncations = [sizes.truncations[group.form]]
    else:
        truncations = list(sizes.truncations.values())
    for layers in truncations:
        # The weights of one truncation are freed before those of the next are made.
        truncation = make_truncation(layers, sizes, parallel, mesh)
        page_tokens = truncation.program.layout.page_tokens
        match group.section:
            case "model":
                todo = decode_variants(group.tail_forms, sizes, parallel, page_tokens)
            case "layers":
                todo = decode_variants(TAIL_FORMS[:1], sizes, parallel, page_tokens)
            case _:
                todo = variants(layers, sizes, parallel, page_tokens)
        _run_truncation(truncation, todo, recorder)


def decode_variants(
    forms: Sequence[str], sizes: Sizes, parallel: ParallelConfig, page_tokens: int
) -> list[Variant]:
    """Decode steps with some forms of the MoE tail; on one device there is none."""
    pages = -(-sizes.context_tokens // page_tokens)
    return [
        Variant(
            label="alone" if parallel.tp == 1 else form,
            parallel=dataclasses.replace(parallel, tail=form),
            buckets=tuple(
                Bucket("decode", rows, rows, pages)
                for rows in sizes.rows
                if form != FUSED or rows <= FUSED_TOKENS
            ),
        )
        for form in forms
    ]


def variants(
    layers: str, sizes: Sizes, parallel: ParallelConfig, page_tokens: int
) -> list[Variant]:
    """What is timed of a truncation: all forms of the shortest, of the others one."""
    is_base = layers == sizes.base
    forms = TAIL_FORMS if is_base and parallel.tp > 1 else TAIL_FORMS[:1]
    found = decode_variants(forms, sizes, parallel, page_tokens)
    prefill = tuple(
        Bucket("prefill", tokens, 1, -(-tokens // page_tokens)) for tokens in sizes.prefill_tokens
    )
    if is_base and parallel.tp == 1:
        (alone,) = found
        return [dataclasses.replace(alone, buckets=alone.buckets + prefill)]
    if is_base:
        found += [
            Variant(
                label=f"tokens_{choice}",
                parallel=dataclasses.replace(parallel, shard_tokens=choice),
                buckets=prefill,
            )
            for choice in ("off", "on")
        ]
    return found


def longest(sizes: Sizes, parallel: ParallelConfig, mesh: Mesh, most_layers: int) -> str:
    """The first layers of K3, as many as fit into a device's memory, up to `most_layers`."""
    attention = json.loads(_CONFIG.read_text())["text_config"]["linear_attn_config"]
    numbers = range(1, most_layers + 1)
    layers = "".join("K" if number in attention["kda_layers"] else "M" for number in numbers)
    memory = jax.local_devices()[0].memory_stats()
    if memory is None:  # a CPU
        return layers
    fitting = (
        count
        for count in reversed(numbers)
        if bytes_of_rank(make_program(layers[:count], sizes, parallel), mesh)
        <= _MOST_OF_MEMORY * memory["bytes_limit"]
    )
    return layers[: next(fitting, 1)]


def bytes_of_rank(program: Program, mesh: Mesh) -> int:
    """Bytes of a rank's weights and cache."""
    pool = abstract_pool(program.layout, program.parallel.num_ranks)
    arrays = [(pool.shape, pool.dtype, program.pool_spec)] + [
        (spec.shape, _dtype(spec), program.param_specs[part][name])
        for part, specs in describe(program.cfg).items()
        for name, spec in specs.items()
    ]
    return sum(
        math.prod(NamedSharding(mesh, spec).shard_shape(shape)) * jnp.dtype(dtype).itemsize
        for shape, dtype, spec in arrays
    )


def make_truncation(layers: str, sizes: Sizes, parallel: ParallelConfig, mesh: Mesh) -> Truncation:
    """Configuration and random weights of a truncation."""
    program = make_program(layers, sizes, parallel)
    return Truncation(
        layers=layers, program=program, mesh=mesh, params=random_params(program, mesh)
    )


def make_program(layers: str, sizes: Sizes, parallel: ParallelConfig) -> Program:
    """Configuration of a truncation, with a cache for the largest steps."""
    cfg = ModelConfig.from_hf(text_config(json.loads(_CONFIG.read_text()), layers, sizes))
    spec = cache_spec(cfg, tp=parallel.tp, dtype=_DTYPE)
    unit_tokens = sizes.page_unit_tokens
    state_tokens = -(-spec.state_bytes // spec.token_bytes)
    page_tokens = -(-state_tokens // unit_tokens) * unit_tokens
    attention_pages = -(-max((sizes.context_tokens, *sizes.prefill_tokens)) // page_tokens)
    num_pages = 1 + max(sizes.rows) * (attention_pages + len(spec.recurrent_groups))
    cache = CacheConfig(page_tokens=page_tokens, num_pages=num_pages)
    return Program(
        cfg=cfg,
        parallel=parallel,
        layout=pool_layout(cfg, cache, spec, tp=parallel.tp, dtype=_DTYPE),
        dtype=_DTYPE,
        max_rows=max(sizes.rows),
    )


def random_params(program: Program, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Random weights, each made by the devices that hold it."""
    leaves = {
        f"{part}/{name}": Leaf(spec.shape, _maker(name, spec), program.param_specs[part][name])
        for part, specs in describe(program.cfg).items()
        for name, spec in specs.items()
    }
    tree: dict[str, dict[str, Any]] = {}
    for path, array in fill(mesh, leaves).items():
        part, name = path.split("/")
        tree.setdefault(part, {})[name] = array
    return tree


def _maker(name: str, spec: ParamSpec) -> Any:
    """How to make the values of a parameter from random words."""
    dtype = _dtype(spec)
    match spec.init:
        case "bytes":
            return random_scales if name.endswith("_scales") else random_codes
        case "ones":
            return lambda words: (1.0 + 0.5 * unit(words)).astype(dtype)
        case "zeros":
            return normal(0.01, dtype)
        case "a_log":
            return normal(1.0, dtype)
        case _:
            return normal(spec.shape[-1] ** -0.5, dtype)


def _dtype(spec: ParamSpec) -> str:
    return _DTYPE if spec.dtype == "compute" else spec.dtype


def _run_truncation(truncation: Truncation, todo: Sequence[Variant], recorder: Recorder) -> None:
    recorder.note(f"{truncation.layers}: weights are on the devices")

    def build(variant: Variant) -> PagedModel:
        program = dataclasses.replace(truncation.program, parallel=variant.parallel)
        return PagedModel(
            program, truncation.mesh, truncation.params, serving_step, variant.buckets
        )

    # The first alone: the others find most matrix products tuned.
    built: list[PagedModel | Exception] = [_attempt(build, todo[0])]
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(todo)) as threads:
        built += threads.map(lambda variant: _attempt(build, variant), todo[1:])
    recorder.note(f"{truncation.layers}: steps are compiled")
    for variant, model in zip(todo, built, strict=True):
        if isinstance(model, PagedModel):
            model.pool = None  # its memory is free for the new one
            model.pool = random_pool(truncation.program, truncation.mesh)
        for bucket in variant.buckets:
            _time_step(truncation, variant, model, bucket, recorder)


def _attempt(build: Any, variant: Variant) -> PagedModel | Exception:
    """The model, or why it could not be built: its cases report that."""
    try:
        return build(variant)
    except Exception as error:
        return error


def _time_step(
    truncation: Truncation,
    variant: Variant,
    model: PagedModel | Exception,
    bucket: Bucket,
    recorder: Recorder,
) -> None:
    program, sizes = truncation.program, recorder.sizes
    size = {"rows": bucket.rows} if bucket.kind == "decode" else {"tokens": bucket.tokens}
    shapes = {"layers": truncation.layers, **size, "tp": program.parallel.tp}
    if bucket.kind == "decode":
        shapes["context_tokens"] = sizes.context_tokens
    case = f"{bucket.kind}/{truncation.layers}/{variant.label}"
    with recorder.case(case, shapes) as line:
        if isinstance(model, Exception):
            raise model
        packed = packed_inputs(program, bucket, sizes)
        ids = checked_ids(program, bucket, np.asarray(model.run(bucket, packed).result))
        line["greedy_ids"] = ids[:_RECORDED_IDS]
        seconds = sample(
            lambda: model.run(bucket, packed), target_s=sizes.step_s, most=sizes.most_samples
        )
        line["unit"], line["operations"] = "ms", 1
        line["samples"] = [value * 1e3 for value in seconds]


def random_pool(program: Program, mesh: Mesh) -> Array:
    """Random entries and states: positive and negative numbers around 2^-7 in both views."""
    shape = abstract_pool(program.layout, program.parallel.num_ranks).shape

    def words(random: Array) -> Array:
        return ((random & 0x80FF) | 0x3C00).astype(jnp.uint16)

    return fill(mesh, {"pool": Leaf(shape, words, program.pool_spec)})["pool"]


def packed_inputs(program: Program, bucket: Bucket, sizes: Sizes) -> Int32[np.ndarray, "1 n"]:
    """Inputs of a step: decode rows that know `context_tokens` tokens, or one new prompt."""
    num_groups = program.num_recurrent_groups
    inputs = empty_inputs(bucket, num_groups, scratch_slot=program.max_rows)
    row = np.arange(bucket.rows, dtype=np.int32)
    generator = np.random.default_rng(0)
    inputs.tokens[:] = generator.integers(program.cfg.vocab_size, size=bucket.tokens)
    inputs.row_offsets[:] = np.arange(bucket.rows + 1) * (bucket.tokens // bucket.rows)
    if bucket.kind == "decode":
        inputs.computed[:] = sizes.context_tokens - 1
    inputs.slots[:] = row
    pages = 1 + np.arange(bucket.rows * (bucket.pages + num_groups), dtype=np.int32)
    pages = pages.reshape(bucket.rows, -1)
    inputs.attention_pages[:] = pages[:, : bucket.pages]
    inputs.state_source[:] = inputs.state_target[:] = pages[:, bucket.pages :]
    inputs.sample[:] = 1
    return pack(inputs, bucket, num_groups)[None]


def checked_ids(
    program: Program, bucket: Bucket, result: Int32[np.ndarray, "1 n"]
) -> Sequence[int]:
    """Greedy ids of a step.

    Raises:
      WrongResult: logits are not finite, or experts did not get every token.
    """
    output = unpack(result, bucket.rows)
    if not output.finite.all():
        raise WrongResult(f"logits are not finite in {int((~output.finite).sum())} rows")
    cfg = program.cfg
    load = int(output.expert_load.sum())
    expected = bucket.tokens * cfg.experts_per_token * len(cfg.moe_layers)
    if load != expected:
        raise WrongResult(f"load of the experts is wrong: got {load}; expected {expected}")
    return output.tokens.reshape(-1).tolist()
