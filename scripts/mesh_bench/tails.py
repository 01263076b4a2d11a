"""The MoE tail in its three forms, and bare collectives of its sizes, over two `tp` ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array
from mesh_bench.arrays import Leaf, fill, normal, unit, whole
from mesh_bench.chains import FEEDBACK, Chain, call_chain, run_chains, zeros
from mesh_bench.groups import NUM_DEVICES, TAIL_FORMS, Sizes
from mesh_bench.record import Recorder

from k3jax.layers import linear_f32, rms_norm
from pallas_kernels.numerics import contract, round_to
from sharding.axes import TP, CollectiveTail, ParallelConfig
from sharding.collectives import moe_tail
from sharding.mesh import make_mesh

_EPS = 1e-5
_EVERYWHERE, _ROWS, _COLUMNS = PartitionSpec(), PartitionSpec(TP), PartitionSpec(None, TP)
_WRITTEN: Mapping[str, Mapping[str, int]] = {
    "all_reduce": {"all-reduce": 2},
    "columns": {"all-reduce": 1, "reduce-scatter": 1, "all-gather": 1},
    "folded": {"all-reduce": 2},
}
_BFLOAT16_ERROR, _FLOAT32_ERROR = 1e-2, 1e-5


def run(recorder: Recorder) -> None:
    """Time all cases at all token counts."""
    sizes = recorder.sizes
    mesh = make_mesh(ParallelConfig(tp=NUM_DEVICES))
    weights = {
        "up": Leaf((sizes.hidden, sizes.latent), normal(sizes.latent**-0.5, "bfloat16")),
        "norm": Leaf((sizes.latent,), lambda words: (1.0 + unit(words)).astype(jnp.bfloat16)),
    }
    on_mesh = fill(mesh, weights)
    chains = [call_chain(mesh, sizes.hidden, sizes.chain)]
    for tokens in sizes.tail_tokens:
        partials = {
            "routed": Leaf((NUM_DEVICES * tokens, sizes.latent), normal(1.0, "float32"), _ROWS),
            "shared": Leaf((NUM_DEVICES * tokens, sizes.hidden), normal(1.0, "float32"), _ROWS),
            "columns": Leaf((tokens, sizes.hidden), normal(1.0, "bfloat16"), _COLUMNS),
        }
        arrays = on_mesh | fill(mesh, partials)
        leaves = weights | partials
        chains += _tail_chains(mesh, sizes, tokens, leaves, arrays)
        chains += _bare_chains(mesh, sizes, tokens, leaves, arrays)
    recorder.note("inputs and references are on the devices")
    run_chains(chains, mesh, recorder)


def _tail_chains(
    mesh: Mesh,
    sizes: Sizes,
    tokens: int,
    leaves: Mapping[str, Leaf],
    arrays: Mapping[str, jax.Array],
) -> list[Chain]:
    names = ("routed", "shared", "up", "norm")
    inputs = {name: arrays[name] for name in names}

    def dense(_: Mapping[str, Array]) -> Array:
        full = whole({name: leaves[name] for name in names})
        latent, shared = (_sum_of_ranks(full[name]) for name in ("routed", "shared"))
        normed = rms_norm(latent, full["norm"].astype(jnp.float32), _EPS)
        return contract("tl,hl->th", normed, full["up"].astype(jnp.float32)) + shared

    return [
        Chain(
            case=f"tail/{form}",
            shapes={"tokens": tokens, "latent": sizes.latent, "hidden": sizes.hidden},
            operation=partial(_tail, form),
            num_operations=sizes.chain_of(tokens),
            inputs=inputs,
            input_specs={name: leaves[name].spec for name in names},
            carry=zeros(mesh, (tokens, sizes.hidden), "bfloat16", _EVERYWHERE),
            reference=dense,
            most_error=_BFLOAT16_ERROR,
            collectives=_WRITTEN[form],
        )
        for form in TAIL_FORMS
    ]


def _tail(form: CollectiveTail, carry: Array, inputs: Mapping[str, Array]) -> Array:
    """One tail; the last result goes into both partials."""
    last = FEEDBACK * carry.astype(jnp.float32)
    return moe_tail(
        form,
        inputs["routed"] + last[:, : inputs["routed"].shape[1]],
        inputs["shared"] + last,
        norm=lambda x: round_to(rms_norm(x, inputs["norm"], _EPS), carry.dtype),
        up=inputs["up"],
        linear=linear_f32,
        finish=lambda x: round_to(x, carry.dtype),
    )


def _bare_chains(
    mesh: Mesh,
    sizes: Sizes,
    tokens: int,
    leaves: Mapping[str, Leaf],
    arrays: Mapping[str, jax.Array],
) -> list[Chain]:
    """The collectives of the tails alone, and an operation without any."""
    latent, hidden = sizes.latent, sizes.hidden
    both = latent + hidden
    half = hidden // NUM_DEVICES

    def case(
        name: str, operation: Callable[..., Array], dense: Callable[..., Array], width: int,
        inputs: tuple[str, ...], collectives: Mapping[str, int],
        spec: PartitionSpec = _EVERYWHERE, dtype: str = "float32",
    ) -> Chain:  # fmt: skip
        specs = {one: leaves[one].spec for one in inputs}
        is_summed = bool(collectives)

        def expected(held: Mapping[str, Array]) -> Array:
            return dense(whole({one: leaves[one] for one in inputs}) if is_summed else held)

        return Chain(
            case=f"bare/{name}",
            shapes={"tokens": tokens, "width": width},
            operation=operation,
            num_operations=sizes.chain_of(tokens),
            inputs={one: arrays[one] for one in inputs},
            input_specs=specs,
            carry=zeros(mesh, (tokens, width), dtype, spec),
            reference=expected,
            most_error=_FLOAT32_ERROR if dtype == "float32" else _BFLOAT16_ERROR,
            collectives=collectives,
        )

    def fed(carry: Array, x: Array) -> Array:
        return x + FEEDBACK * carry

    def joined(inputs: Mapping[str, Array]) -> Array:
        return jnp.concatenate([inputs["routed"], inputs["shared"]], axis=1)

    def halves(x: Array) -> Array:
        return x[:, :half] + x[:, half:]

    def own_columns(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, half * lax.axis_index(TP), half, axis=1)

    return [
        case(
            "none",
            lambda carry, inputs: lax.optimization_barrier(fed(carry, inputs["shared"])),
            lambda held: held["shared"], hidden, ("shared",), {},
        ),
        case(
            "psum_latent",
            lambda carry, inputs: lax.psum(fed(carry, inputs["routed"]), TP),
            lambda full: _sum_of_ranks(full["routed"]), latent, ("routed",), {"all-reduce": 1},
        ),
        case(
            "psum_latent_hidden",
            lambda carry, inputs: lax.psum(fed(carry, joined(inputs)), TP),
            lambda full: _sum_of_ranks(joined(full)), both, ("routed", "shared"),
            {"all-reduce": 1},
        ),
        case(
            "psum_scatter_hidden",
            lambda carry, inputs: lax.psum_scatter(
                fed(jnp.concatenate([carry, carry], axis=1), inputs["shared"]), TP,
                scatter_dimension=1, tiled=True,
            ),
            lambda full: own_columns(_sum_of_ranks(full["shared"])), hidden, ("shared",),
            {"reduce-scatter": 1}, _COLUMNS,
        ),
        case(
            "all_gather_hidden",
            lambda carry, inputs: halves(
                lax.all_gather(fed(carry, inputs["columns"]), TP, axis=1, tiled=True)
            ),
            lambda full: halves(full["columns"].astype(jnp.float32)), half, ("columns",),
            {"all-gather": 1}, dtype="bfloat16",
        ),
    ]  # fmt: skip


def _sum_of_ranks(partials: Array) -> Array:
    return jnp.sum(partials.reshape(NUM_DEVICES, -1, partials.shape[1]), axis=0)
