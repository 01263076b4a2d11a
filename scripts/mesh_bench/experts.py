"""The exchange of tokens with the experts of all ranks, in its three forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array
from mesh_bench.arrays import Leaf, fill, normal, unit
from mesh_bench.chains import FEEDBACK, Chain, call_chain, run_chains, zeros
from mesh_bench.groups import Group, Sizes
from mesh_bench.record import Recorder

from pallas_kernels.moe import PackedWeight, dequantize, moe_experts
from pallas_kernels.numerics import contract, round_to
from pallas_kernels.situ import situ_glu
from sharding.axes import DP, ParallelConfig
from sharding.dispatch import exchange, expert_axes, first_expert
from sharding.mesh import make_mesh

_ROWS = PartitionSpec(DP)
_EXPERTS = PartitionSpec(None, DP)
_WRITTEN: Mapping[str, Mapping[str, int]] = {
    "all_gather": {"all-gather": 2, "reduce-scatter": 1},
    "all_to_all": {"all-to-all": 3},
    "ragged": {"all-to-all": 1, "ragged-all-to-all": 3},
    "none": {},
}
_CHECKED_TOKENS = 2  # of each rank, with real experts
_PLAIN_ERROR, _EXPERTS_ERROR = 1e-5, 1e-2
_BETA, _LINEAR_BETA = 4.0, 25.0

# Latents, ids and mixing weights, and all inputs -> the part of this rank's experts.
Experts = Callable[[Array, Array, Array, Mapping[str, Array]], Array]


def run(recorder: Recorder, group: Group) -> None:
    """Time all cases at all token counts."""
    sizes = recorder.sizes
    parallel = ParallelConfig(dp=group.num_devices)
    mesh = make_mesh(parallel)
    chains = [call_chain(mesh, sizes.hidden, sizes.exchange_chain)]
    for tokens in sizes.dispatch_tokens:
        chains += _plain_chains(mesh, parallel, sizes, tokens, group)
    chains += _expert_chains(mesh, parallel, sizes, group)
    if jax.default_backend() == "cpu":
        recorder.note("no ragged all-to-all on CPUs")
        chains = [chain for chain in chains if "ragged" not in chain.case]
    recorder.note("inputs and references are on the devices")
    run_chains(chains, mesh, recorder)


def _tokens(sizes: Sizes, ranks: int, tokens: int) -> dict[str, Leaf]:
    """Latents, distinct experts and mixing weights of the tokens of all ranks."""
    stride = sizes.num_experts // sizes.num_choices

    def ids(words: Array) -> Array:
        choice = lax.broadcasted_iota(jnp.int32, words.shape, 1)
        return choice * stride + (words % jnp.uint32(stride)).astype(jnp.int32)

    shape = (ranks * tokens, sizes.num_choices)
    return {
        "z": Leaf((ranks * tokens, sizes.latent), normal(1.0, "bfloat16"), _ROWS),
        "ids": Leaf(shape, ids, _ROWS),
        "mixing": Leaf(shape, lambda words: (unit(words) + 1.0) / sizes.num_choices, _ROWS),
    }


def _operation(
    parallel: ParallelConfig | None,
    experts: Experts,
    num_local: int,
    carry: Array,
    inputs: Mapping[str, Array],
) -> Array:
    """One exchange, or without `parallel` only this rank's experts. Latents and ids depend on the
    last result."""
    z, ids, mixing = (inputs[name] for name in ("z", "ids", "mixing"))
    z = round_to(z.astype(jnp.float32) + FEEDBACK * carry, z.dtype)
    ids += (carry[0, 0] > 1e30).astype(jnp.int32)  # never, but only at run time one can tell

    def local(z: Array, ids: Array, mixing: Array) -> Array:
        return experts(z, ids, mixing, inputs)

    if parallel is None:
        return lax.optimization_barrier(local(z, ids, mixing))
    axes = expert_axes(is_sharded=False)
    return exchange(parallel, axes, local, z, ids, mixing, num_local=num_local)


def _plain_chains(
    mesh: Mesh, parallel: ParallelConfig, sizes: Sizes, tokens: int, group: Group
) -> list[Chain]:
    """Experts that return their input, so that little but the exchange is left."""
    num_local = sizes.num_experts // group.num_devices

    def experts(z: Array, ids: Array, mixing: Array, _: Mapping[str, Array]) -> Array:
        local = ids - first_expert(parallel, num_local)
        is_here = (local >= 0) & (local < num_local)
        weight = jnp.sum(jnp.where(is_here, mixing, 0.0), axis=1, keepdims=True)
        return weight * z.astype(jnp.float32)

    def all_ranks(held: Mapping[str, Array]) -> Array:
        return jnp.sum(held["mixing"], axis=1, keepdims=True) * held["z"].astype(jnp.float32)

    def own_rank(held: Mapping[str, Array]) -> Array:
        return experts(held["z"], held["ids"], held["mixing"], held)

    leaves = _tokens(sizes, group.num_devices, tokens)
    inputs = fill(mesh, leaves)
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    return [
        Chain(
            case=f"exchange/{form}",
            shapes={"tokens_per_rank": tokens, "latent": sizes.latent},
            operation=partial(_operation, _with_form(parallel, form), experts, num_local),
            num_operations=sizes.exchanges_of(tokens),
            inputs=inputs,
            input_specs=specs,
            carry=zeros(mesh, leaves["z"].shape, "float32", _ROWS),
            reference=own_rank if form == "none" else all_ranks,
            most_error=_PLAIN_ERROR,
            collectives=_WRITTEN[form],
        )
        for form in ("none", *group.dispatch_forms)
    ]


def _expert_chains(mesh: Mesh, parallel: ParallelConfig, sizes: Sizes, group: Group) -> list[Chain]:
    """Real experts on MXFP4 weights, an equal share of them on each rank."""
    num_local = sizes.num_experts // group.num_devices
    tokens = sizes.expert_tokens
    leaves = _tokens(sizes, group.num_devices, tokens) | _expert_weights(sizes)
    inputs = fill(mesh, leaves)
    specs = {name: leaf.spec for name, leaf in leaves.items()}

    def experts(z: Array, ids: Array, mixing: Array, inputs: Mapping[str, Array]) -> Array:
        first = first_expert(parallel, num_local)
        w13, w2 = _packed(inputs)
        return moe_experts(
            z, ids, mixing, w13, w2, layer=0, first_expert=first, activation=_activation()
        )

    return [
        Chain(
            case=f"experts/{form}",
            shapes={"tokens_per_rank": tokens, "latent": sizes.latent, "experts": num_local},
            operation=partial(_operation, _with_form(parallel, form), experts, num_local),
            num_operations=sizes.expert_chain,
            inputs=inputs,
            input_specs=specs,
            carry=zeros(mesh, leaves["z"].shape, "float32", _ROWS),
            reference=partial(_dense, parallel, num_local),
            most_error=_EXPERTS_ERROR,
            collectives=_WRITTEN[form],
        )
        for form in group.dispatch_forms
    ]


def _with_form(parallel: ParallelConfig, form: str) -> ParallelConfig | None:
    return None if form == "none" else dataclasses.replace(parallel, dispatch=form)


def _expert_weights(sizes: Sizes) -> dict[str, Leaf]:
    """Random codes, and scales that keep results near one."""
    w13 = (1, sizes.num_experts, 2, sizes.expert_hidden, sizes.latent)
    w2 = (1, sizes.num_experts, sizes.latent, sizes.expert_hidden)
    leaves: dict[str, Leaf] = {}
    for name, (*lead, last) in (("w13", w13), ("w2", w2)):
        leaves[f"{name}_codes"] = Leaf((*lead, last // 2), random_codes, _EXPERTS)
        leaves[f"{name}_scales"] = Leaf((*lead, last // 32), random_scales, _EXPERTS)
    return leaves


def random_codes(words: Array) -> Array:
    """Any bytes are MXFP4 codes."""
    return words.astype(jnp.uint8)


def random_scales(words: Array) -> Array:
    """2^-8 or 2^-7: a row of thousands of random codes maps to about the size of its input."""
    return (119 + (words & 1)).astype(jnp.uint8)


def _packed(inputs: Mapping[str, Array]) -> tuple[PackedWeight, PackedWeight]:
    w13, w2 = (
        PackedWeight(inputs[f"{name}_codes"], inputs[f"{name}_scales"]) for name in ("w13", "w2")
    )
    return w13, w2


def _activation() -> Callable[[Array, Array], Array]:
    return partial(situ_glu, beta=_BETA, linear_beta=_LINEAR_BETA)


def _dense(parallel: ParallelConfig, num_local: int, held: Mapping[str, Array]) -> Array:
    """Float32 results of the first tokens of this rank, one expert after the other."""
    z, ids, mixing = (
        lax.all_gather(held[name][:_CHECKED_TOKENS], DP, axis=0, tiled=True)
        for name in ("z", "ids", "mixing")
    )
    w13, w2 = _packed(held)
    num_choices = ids.shape[1]

    def matrix(weight: PackedWeight, expert: Array) -> Array:
        codes, scales = (lax.dynamic_index_in_dim(x[0], expert, keepdims=False) for x in weight)
        return dequantize(codes, scales, jnp.float32)

    def add(index: Array, total: Array) -> Array:
        token, choice = index // num_choices, index % num_choices
        local = ids[token, choice] - first_expert(parallel, num_local)
        is_here = (local >= 0) & (local < num_local)
        expert = jnp.where(is_here, local, 0)
        both = contract("l,gfl->gf", z[token].astype(jnp.float32), matrix(w13, expert))
        out = contract("f,lf->l", _activation()(both[0], both[1]), matrix(w2, expert))
        weight = jnp.where(is_here, mixing[token, choice], 0.0)
        return total.at[token].add(weight * out)

    start = jnp.zeros(z.shape, jnp.float32)
    total = lax.fori_loop(0, ids.size, add, start)
    return lax.psum_scatter(total, DP, scatter_dimension=0, tiled=True)
