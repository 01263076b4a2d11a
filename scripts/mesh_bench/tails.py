"""The MoE tail in its forms, over all `tp` ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array
from mesh_bench.arrays import Leaf, fill, normal, unit, whole
from mesh_bench.chains import FEEDBACK, Chain, call_chain, run_chains, zeros
from mesh_bench.groups import FUSED, FUSED_TOKENS, Group, Sizes
from mesh_bench.record import Recorder

from k3jax.layers import linear_f32, rms_norm
from pallas_kernels.moe_tail import moe_tail as fused_tail
from pallas_kernels.numerics import contract, round_to
from sharding.axes import TP, ParallelConfig, TailForm
from sharding.collectives import moe_tail
from sharding.mesh import make_mesh

_EPS = 1e-5
_EVERYWHERE, _ROWS = PartitionSpec(), PartitionSpec(TP)
_WRITTEN: Mapping[str, Mapping[str, int]] = {
    "all_reduce": {"all-reduce": 2},
    "columns": {"all-reduce": 1, "reduce-scatter": 1, "all-gather": 1},
    "folded": {"all-reduce": 2},
    FUSED: {},
}
_MOST_ERROR = 1e-2


def run(recorder: Recorder, group: Group) -> None:
    """Time all cases at all token counts."""
    sizes = recorder.sizes
    ranks = group.num_devices
    mesh = make_mesh(ParallelConfig(tp=ranks))
    weights = {
        "up": Leaf((sizes.hidden, sizes.latent), normal(sizes.latent**-0.5, "bfloat16")),
        "norm": Leaf((sizes.latent,), lambda words: (1.0 + unit(words)).astype(jnp.bfloat16)),
    }
    on_mesh = fill(mesh, weights)
    chains = [call_chain(mesh, sizes.hidden, sizes.chain)]
    for tokens in sizes.tail_tokens:
        partials = {
            "routed": Leaf((ranks * tokens, sizes.latent), normal(1.0, "float32"), _ROWS),
            "shared": Leaf((ranks * tokens, sizes.hidden), normal(1.0, "float32"), _ROWS),
        }
        arrays = on_mesh | fill(mesh, partials)
        chains += [
            _chain(form, mesh, sizes, tokens, weights | partials, arrays)
            for form in group.tail_forms
            if form != FUSED or tokens <= FUSED_TOKENS
        ]
    recorder.note("inputs and references are on the devices")
    run_chains(chains, mesh, recorder)


def _chain(
    form: TailForm,
    mesh: Mesh,
    sizes: Sizes,
    tokens: int,
    leaves: Mapping[str, Leaf],
    arrays: Mapping[str, jax.Array],
) -> Chain:
    names = ("routed", "shared", "up", "norm")
    inputs = {name: arrays[name] for name in names}

    def dense(_: Mapping[str, Array]) -> Array:
        full = whole({name: leaves[name] for name in names})
        latent, shared = (
            _sum_of_ranks(full[name], mesh.shape[TP]) for name in ("routed", "shared")
        )
        normed = rms_norm(latent, full["norm"].astype(jnp.float32), _EPS)
        return contract("tl,hl->th", normed, full["up"].astype(jnp.float32)) + shared

    return Chain(
        case=f"tail/{form}",
        shapes={"tokens": tokens, "latent": sizes.latent, "hidden": sizes.hidden},
        operation=partial(_tail, form),
        num_operations=sizes.chain_of(tokens),
        inputs=inputs,
        input_specs={name: leaves[name].spec for name in names},
        carry=zeros(mesh, (tokens, sizes.hidden), "bfloat16", _EVERYWHERE),
        reference=dense,
        most_error=_MOST_ERROR,
        collectives=_WRITTEN[form],
    )


def _tail(form: TailForm, carry: Array, inputs: Mapping[str, Array]) -> Array:
    """One tail; the last result goes into both partials."""
    last = FEEDBACK * carry.astype(jnp.float32)
    routed = inputs["routed"] + last[:, : inputs["routed"].shape[1]]
    shared = inputs["shared"] + last
    if form == "fused":
        return fused_tail(routed, shared, inputs["norm"], inputs["up"], axis=TP, eps=_EPS)
    return moe_tail(
        form,
        routed,
        shared,
        norm=lambda x: round_to(rms_norm(x, inputs["norm"], _EPS), carry.dtype),
        up=inputs["up"],
        linear=linear_f32,
        finish=lambda x: round_to(x, carry.dtype),
    )


def _sum_of_ranks(partials: Array, ranks: int) -> Array:
    return jnp.sum(partials.reshape(ranks, -1, partials.shape[1]), axis=0)
