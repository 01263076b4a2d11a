"""Router on Hopper: one block of four warps a token.

Each warp selects the best of a quarter of the experts, then each the best of what all selected. A
round takes the largest biased score that is left, and of equal ones the lowest expert id. Scores
are compared as integers in the order of the floats, for which a warp has instructions to reduce.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels import pdl as pdl_switch
from pallas_kernels import settings
from pallas_kernels.hopper import require_hopper

WARPS = 4
LANES = 32
TOP_K_MULTIPLE = 4  # a bulk copy stores multiples of 16 bytes
_REMOVED = np.int32(-(2**31))
_NO_ID = np.int32(2**31 - 1)

# A warp has a row, neighbouring columns are on neighbouring lanes.
_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, LANES), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def route(
    logits_TE: Float32[Array, "T E"],
    bias_E: Float32[Array, " E"],
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """See `api.route`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments that the kernel does not take.
    """
    del topk_groups  # one of one
    require_hopper()
    if num_groups > 1:
        raise NotImplementedError(f"takes one group of experts: got {num_groups}")
    if logits_TE.shape[1] % (WARPS * LANES):
        expected = f"a multiple of {WARPS * LANES} experts"
        raise NotImplementedError(f"takes {expected}: got {logits_TE.shape[1]}")
    if top_k % TOP_K_MULTIPLE or top_k > LANES:
        expected = f"a multiple of {TOP_K_MULTIPLE} up to {LANES}"
        raise NotImplementedError(f"takes a top_k that is {expected}: got {top_k}")
    return launch(
        logits_TE, bias_E, top_k=top_k, renormalize=renormalize, scaling=scaling,
        pdl=settings.current().pdl,
    )  # fmt: skip


# Jitted, so that a program of many layers lowers and compiles the kernel once.
@functools.partial(jax.jit, static_argnames=("top_k", "renormalize", "scaling", "pdl", "interpret"))
def launch(
    logits_TE: Array,
    bias_E: Array,
    *,
    top_k: int,
    renormalize: bool,
    scaling: float,
    pdl: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array]:
    """Run the kernel, or interpret it on a CPU."""
    num_tokens, num_experts = logits_TE.shape
    tile, results = (WARPS, num_experts // WARPS), (WARPS, LANES)
    return tuple(
        plgpu.kernel(
            functools.partial(_block, renormalize=renormalize, scaling=scaling, pdl=pdl),
            out_type=[
                jax.ShapeDtypeStruct((num_tokens, top_k), dtype)
                for dtype in (jnp.int32, jnp.float32)
            ],
            grid=(num_tokens,),
            grid_names=("token",),
            scratch_types={
                "scores_s": plgpu.SMEM(tile, jnp.float32),
                "keys_s": plgpu.SMEM(results, jnp.int32),
                "ids_s": plgpu.SMEM(results, jnp.int32),
                "weights_s": plgpu.SMEM(results, jnp.float32),
            },
            interpret=interpret,
        )(logits_TE.reshape(num_tokens, *tile), bias_E.reshape(tile))
    )


def _block(
    logits_g, bias_g, ids_g, weights_g, *, scores_s, keys_s, ids_s, weights_s,
    renormalize: bool, scaling: float, pdl: bool,
) -> None:  # fmt: skip
    token, top_k = lax.axis_index("token"), ids_g.shape[1]

    def load(ref) -> Array:
        return plgpu.load(ref, layout=_ROWS, optimized=False)

    # The bias comes after the wait as well: it is a slice, which the step may have copied.
    pdl_switch.wait(pdl)
    pdl_switch.launch_dependents(pdl)
    bias = load(bias_g)
    score = jax.nn.sigmoid(load(logits_g.at[token]))
    scores_s[...] = score
    bits = lax.bitcast_convert_type(score + bias, jnp.int32)
    keys = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))  # in the order of the floats
    row, column = (plgpu.broadcasted_iota(jnp.int32, keys.shape, i, layout=_ROWS) for i in (0, 1))
    keys_s[...], ids_s[...] = _largest([keys], [row * keys.shape[1] + column], top_k)

    def of_all_warps(ref) -> list[Array]:
        rows = (
            plgpu.load(ref.at[warp], layout=_ROWS.reduce(0), optimized=False)
            for warp in range(WARPS)
        )
        return [lax.broadcast_in_dim(row, ref.shape, (1,)) for row in rows]

    _, ids = _largest(of_all_warps(keys_s), of_all_warps(ids_s), top_k)
    ids_s[...] = ids
    chosen = [
        scores_s[ids_s[0, place] // keys.shape[1], ids_s[0, place] % keys.shape[1]]
        for place in range(top_k)
    ]
    total = functools.reduce(jnp.add, chosen) + 1e-20 if renormalize and top_k > 1 else 1.0
    places = plgpu.broadcasted_iota(jnp.int32, ids.shape, 1, layout=_ROWS)
    weights = plgpu.layout_cast(jnp.zeros(ids.shape, jnp.float32), _ROWS)
    for place, weight in enumerate(chosen):
        weights = jnp.where(places == place, weight, weights)
    weights_s[...] = weights / total * scaling
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ids_s.at[0, pl.ds(0, top_k)], ids_g.at[token])
    plgpu.copy_smem_to_gmem(weights_s.at[0, pl.ds(0, top_k)], weights_g.at[token])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _largest(keys: list[Array], ids: list[Array], count: int) -> tuple[Array, Array]:
    """The largest keys of each row and their ids, in order; what follows them is to be ignored."""
    shape = (WARPS, LANES)
    places = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_ROWS)

    def every_column(value: Array, shape: tuple[int, ...]) -> Array:
        return lax.broadcast_in_dim(value, shape, (0,))

    def choose(place: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        keys, best_keys, best_ids = carry
        key = jnp.max(functools.reduce(jnp.maximum, keys), axis=1)
        equal = [each == every_column(key, each.shape) for each in keys]
        candidates = [jnp.where(same, each, _NO_ID) for same, each in zip(equal, ids, strict=True)]
        best = jnp.min(functools.reduce(jnp.minimum, candidates), axis=1)
        keys = [
            jnp.where(each == every_column(best, each.shape), _REMOVED, key)
            for key, each in zip(keys, ids, strict=True)
        ]
        here = places == place
        return (
            keys,
            jnp.where(here, every_column(key, shape), best_keys),
            jnp.where(here, every_column(best, shape), best_ids),
        )

    none = plgpu.layout_cast(jnp.full(shape, _REMOVED), _ROWS)
    return lax.fori_loop(0, count, choose, (keys, none, places))[1:]
