"""Grouped product with MXFP4 weights on Hopper: one block a (tile of tokens, 128 weight rows).

The weights are the left operand of `wgmma` and the tokens its right one, so a tile may have as few
as 8 tokens. A block copies the packed rows and its tokens' inputs through a ring in shared memory,
expands the codes in registers and multiplies. Blocks of tiles without work leave at once.

Dims: `Bn` tiles, `Tb` tokens of a tile, `M` rows of an expert's matrix, `K` their length.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import pdl as launch_order
from pallas_kernels.moe.fragments import (
    CODES_LAYOUT,
    SCALE_SHIFT,
    SCALES_LAYOUT,
    expand,
    expand_interpreted,
)
from pallas_kernels.moe.mxfp4 import GROUP, PackedWeight

ROWS = 64  # weight rows of one accumulator; a block has two
K_MULTIPLE = 16 * GROUP  # a copy of scales moves multiples of 16 bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Depth of the ring in steps, and the numbers of a weight row that one step takes."""

    steps: int = 3
    k_step: int = 256


@functools.partial(jax.jit, static_argnames=("activation", "ring", "pdl", "interpret"))
def grouped_product(
    matrix_Bn: Int32[Array, " Bn"],
    x_BxTbK: BFloat16[Array, "Bx Tb K"],
    weight: PackedWeight,
    *,
    activation: Callable[[Array, Array], Array] | None,
    ring: Ring,
    pdl: bool = False,
    interpret: Any = None,
) -> Float32[Array, "Bn Tb M"]:
    """Multiply every tile of tokens with the matrix of its expert.

    Layers do not show in the program, and it is a function of its own in what calls it: however
    many layers a model has, the kernel is compiled once.

    Args:
      matrix_Bn: layer * E + expert of each tile; negative for a tile without work, whose result is
        not written.
      x_BxTbK: inputs in `fragment_order`, one block a tile or one block for all (Bx = 1).
      weight: [Z, E, M, K], or with `activation` [Z, E, 2, M, K]: gate and up matrix.
      activation: (gate, up) -> activation, float32; None for a plain product.
      pdl: `KernelSettings.pdl`. Nothing is loaded before the wait: which weights a block needs is
        computed in the step.
      interpret: parameters of the interpreter; None compiles.
    """
    *lead, num_k = weight.shape[2:]
    num_rows, width = math.prod(lead), lead[-1]
    tile_tokens = x_BxTbK.shape[1]
    # A block's second set of rows: of the up matrix, or the next ones.
    columns, second = (ROWS, width) if activation else (2 * ROWS, ROWS)
    k_step, num_steps = ring.k_step, num_k // ring.k_step
    depth = min(ring.steps, num_steps)

    def body(
        matrix_g: Any, codes_g: Any, scales_g: Any, x_g: Any, out_g: Any, *scratch: Any
    ) -> None:
        codes_s, x_s, scales_s, full, full_scales, *weights_s = scratch
        tile, block = lax.axis_index("tile"), lax.axis_index("block")
        launch_order.wait(pdl)
        launch_order.launch_dependents(pdl)
        matrix = matrix_g[tile]

        @pl.when(matrix >= 0)
        def _() -> None:
            first = matrix * num_rows + block * columns
            rows = [pl.ds(pl.multiple_of(row, ROWS), ROWS) for row in (first, first + second)]
            x_tile = x_g.at[tile if x_g.shape[0] > 1 else 0]

            def fetch(step: Array, slot: Array) -> None:
                for half in range(2):
                    packed = codes_g.at[rows[half], pl.ds(step * (k_step // 2), k_step // 2)]
                    plgpu.copy_gmem_to_smem(packed, codes_s.at[slot, half], full.at[slot])
                inputs = x_tile.at[:, pl.ds(step * k_step, k_step)]
                plgpu.copy_gmem_to_smem(inputs, x_s.at[slot], full.at[slot])

            for half in range(2):
                plgpu.copy_gmem_to_smem(scales_g.at[rows[half]], scales_s.at[half], full_scales)
            for step in range(depth):
                fetch(jnp.int32(step), jnp.int32(step))
            plgpu.barrier_wait(full_scales)

            def products(*sums: Any) -> tuple[Array, Array]:
                @pl.loop(0, num_steps)
                def _(step: Array) -> None:
                    slot = lax.rem(step, jnp.int32(depth))
                    groups = pl.ds(step * (k_step // GROUP), k_step // GROUP)
                    plgpu.barrier_wait(full.at[slot])
                    for half, total in enumerate(sums):
                        codes = plgpu.load(codes_s.at[slot, half], layout=CODES_LAYOUT)
                        scales = plgpu.load(
                            scales_s.at[half, :, groups], layout=SCALES_LAYOUT, optimized=False
                        )
                        plgpu.wgmma(total, left_operand(codes, scales), x_s.at[slot].T)
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()  # the reads of this slot come before the next copy into it

                    @pl.when(step + depth < num_steps)
                    def _() -> None:
                        fetch(step + depth, slot)

                return sums[0][...], sums[1][...]

            def left_operand(codes: Array, scales: Array) -> Any:
                if interpret is None:
                    return expand(codes, scales)
                weights_s[0][...] = expand_interpreted(codes, scales)
                plgpu.commit_smem()
                return weights_s[0]

            shape = (ROWS, tile_tokens)
            accumulator = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            both = pl.run_scoped(products, accumulator, accumulator)
            both = [x * 2.0**SCALE_SHIFT for x in both]
            results = [activation(*both)] if activation else both
            for i, result in enumerate(results):
                target = out_g.at[tile, :, pl.ds(block * columns + i * ROWS, ROWS)]
                target.T[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)

    def swizzled(bits: int, width: int = 128) -> tuple[Any, ...]:
        tiling = plgpu.TilingTransform((8, 8 * width // bits))  # pyright: ignore[reportAbstractUsage]
        return tiling, plgpu.SwizzleTransform(width)  # pyright: ignore[reportAbstractUsage]

    scratch = [
        plgpu.SMEM(
            (depth, 2, ROWS, k_step // 2), jnp.uint8, transforms=swizzled(8, min(128, k_step // 2))
        ),
        plgpu.SMEM((depth, tile_tokens, k_step), jnp.bfloat16, transforms=swizzled(16)),
        plgpu.SMEM((2, ROWS, num_k // GROUP), jnp.uint8),
        plgpu.Barrier(num_arrivals=3, num_barriers=depth),
        plgpu.Barrier(num_arrivals=2),
    ]
    if interpret is not None:
        scratch.append(plgpu.SMEM((ROWS, k_step), jnp.bfloat16, transforms=swizzled(16)))
    num_tiles = matrix_Bn.shape[0]
    out_type = jax.ShapeDtypeStruct((num_tiles, tile_tokens, width), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_tiles, width // columns),
        grid_names=("tile", "block"),
        scratch_types=scratch,
        interpret=interpret,
    )(
        matrix_Bn,
        weight.codes.reshape(-1, num_k // 2),
        weight.scales.reshape(-1, num_k // GROUP),
        x_BxTbK,
    )
