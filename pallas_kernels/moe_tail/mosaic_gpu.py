"""MoE tail on Hopper: one kernel on all ranks, which store into each other's memory.

Every rank sends its partial latents to all ranks and its partial columns of the shared experts to
the columns' owners. Once they are there, a rank sums the latents, projects them to its own columns,
adds the shared experts, and sends the columns to all ranks. `mosaic_block` has the steps.

Stores go to one rank each; nothing here uses NVLink multicast. That needs one process that drives
all ranks: with several, JAX would take buffers from symmetric memory, which may be multicast.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import require_hopper
from pallas_kernels.moe_tail.mosaic_block import (
    K_STEP,
    TILE,
    Peers,
    Sizes,
    add_latents,
    exchanged,
    project,
    push,
    scratch,
    start_weights,
)

MAX_TOKENS = 32
RANKS = (2, 4, 8)
MAX_BLOCKS = 132  # multiprocessors of an H200: blocks wait for each other, so all must run


def moe_tail(
    routed_TL: Float[Array, "T L"],
    shared_TH: Float[Array, "T H"],
    gain_L: Float[Array, " L"],
    up_HL: Float[Array, "H L"],
    *,
    axis: str,
    eps: float,
) -> Float[Array, "T H"]:
    """See `api.moe_tail`.

    Raises:
      NotImplementedError: no Hopper GPUs of one process, or arguments that the kernel does not
        take.
    """
    require_hopper()
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"takes one process that drives all GPUs: got {jax.process_count()}"
        )
    num_ranks = lax.axis_size(axis)
    if num_ranks not in RANKS:
        raise NotImplementedError(f"takes {RANKS} ranks: got {num_ranks}")
    (num_tokens, latent), hidden = routed_TL.shape, shared_TH.shape[1]
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise NotImplementedError(f"takes 1 to {MAX_TOKENS} tokens: got {num_tokens}")
    if up_HL.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 weights: got {up_HL.dtype}")
    if latent % K_STEP or latent > hidden:
        expected = f"multiples of {K_STEP} up to the hidden width"
        raise NotImplementedError(f"takes latent widths in {expected}: got {latent}")
    if hidden % (TILE * num_ranks) or hidden > TILE * MAX_BLOCKS:
        expected = f"multiples of {TILE * num_ranks} up to {TILE * MAX_BLOCKS}"
        raise NotImplementedError(f"takes hidden widths in {expected}: got {hidden}")
    return launch(routed_TL, shared_TH, gain_L, up_HL, axis=axis, eps=eps)


# Jitted, so that a program of many layers lowers and compiles the kernel once.
@functools.partial(jax.jit, static_argnames=("axis", "eps"))
def launch(
    routed_TL: Array, shared_TH: Array, gain_L: Array, up_HL: Array, *, axis: str, eps: float
) -> Array:
    """Run the kernel."""
    (tokens, latent), hidden = routed_TL.shape, shared_TH.shape[1]
    size = Sizes(ranks=lax.axis_size(axis), tokens=tokens, latent=latent, hidden=hidden)

    def block(
        routed_g, shared_g, gain_g, up_g, out_g, latents_g, columns_g, scaled_g, squares_g,
        *, weights, inputs, latents, columns, scaled_s, squares_s, out_s,
    ) -> None:  # fmt: skip
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((size.num_flags,)))
        context = size, Peers(axis, flags)
        start_weights(up_g, weights, *context)
        push(routed_g, shared_g, latents_g, columns_g, latents, columns, *context)
        add_latents(latents_g, gain_g, scaled_g, squares_g, scaled_s, squares_s, *context)
        project(
            scaled_g, squares_g, columns_g, up_g, out_g, weights, inputs, out_s, *context, eps=eps
        )

    return plgpu.kernel(
        block,
        out_type=[
            jax.ShapeDtypeStruct((tokens, hidden), up_HL.dtype),
            *exchanged(size, routed_TL.dtype),
        ],
        grid=(size.blocks,),
        grid_names=("block",),
        scratch_types=scratch(size, routed_TL.dtype),
    )(routed_TL, shared_TH, gain_L, up_HL)[0]
