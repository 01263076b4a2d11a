"""MXFP4 codes to bfloat16 in the registers of a Hopper warpgroup, without moving a number.

One lane loads 16 bytes, the 32 codes of one scale. Lane c of each quad expands group c of 128
numbers into its registers of the left operand of `wgmma`, which belong to other columns. So the
contraction runs over the numbers in another order, `fragment_order`, and the right operand is
brought into that order instead of the weights.

A code is moved so that its sign is on bit 15 of a half word and its magnitude on bits 8 to 6: as a
bfloat16 that is the value times 2**-126 (0.5 is subnormal). One multiplication by a power of two
then gives the weight times 2**-SCALE_SHIFT, exactly.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Shaped, UInt8

from pallas_kernels.moe.mxfp4 import GROUP, dequantize

SPAN = 4 * GROUP  # numbers that the lanes of a quad expand at once
SCALE_SHIFT = 16  # scale bytes 18 to 144 are exact; above, the weight is infinite or NaN
_MAX_SCALE = 128 + SCALE_SHIFT
_SCALE_OFFSET = 126 - SCALE_SHIFT
_BOTH_HALVES = 0x0001_0001

# One word of 8 codes and a pair of equal scales -> four pairs; pair j has the codes j and j + 4.
_EXPAND = """{
.reg .b32 a, b, c, d, m;
and.b32 m, $4, 0x00070007; shl.b32 m, m, 6; shl.b32 a, $4, 12; lop3.b32 a, a, 0x80008000, m, 0xEA;
and.b32 m, $4, 0x00700070; shl.b32 m, m, 2; shl.b32 b, $4, 8; lop3.b32 b, b, 0x80008000, m, 0xEA;
and.b32 m, $4, 0x07000700; shr.u32 m, m, 2; shl.b32 c, $4, 4; lop3.b32 c, c, 0x80008000, m, 0xEA;
and.b32 m, $4, 0x70007000; shr.u32 m, m, 6; lop3.b32 d, $4, 0x80008000, m, 0xEA;
mul.rn.bf16x2 $0, a, $5; mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5; mul.rn.bf16x2 $3, d, $5;
}"""  # lop3 0xEA: (x & y) | z


def _rows_of_quads(columns: int, vector: int) -> Any:
    """64 rows, 16 a warp; the lanes of a quad share a row and hold `columns` of it in order."""
    tiling = plgpu.Tiling(((64, columns), (16, columns), (8, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


CODES_LAYOUT = _rows_of_quads(SPAN // 2, GROUP // 2)
SCALES_LAYOUT = _rows_of_quads(SPAN // GROUP, 1)


def fragment_order(x: Shaped[Array, "*lead K"]) -> Shaped[Array, "*lead K"]:
    """Reorder the last axis, a multiple of 128, as `expand` orders the weights."""
    lead = x.shape[:-1]
    grouped = x.reshape(*lead, -1, 4, 4, 2, 4)  # lane, word, half, pair
    n = len(lead)
    order = (*range(n + 1), n + 2, n + 4, n + 1, n + 3)
    return grouped.transpose(order).reshape(x.shape)


def expand(
    codes: UInt8[Array, "64 K_half"], scales: UInt8[Array, "64 K_groups"]
) -> BFloat16[Array, "64 K"]:
    """Return weights * 2**-SCALE_SHIFT in `fragment_order`, in the registers of a left operand.

    For the inside of a kernel, with `CODES_LAYOUT` and `SCALES_LAYOUT`.
    """
    shape = (codes.shape[0], 2 * codes.shape[1])
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(CODES_LAYOUT, SCALES_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout),
    )
    def registers(
        _: mgpu.LaunchContext, codes: mgpu.FragmentedArray, scales: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        words = ir.VectorType.get((4,), i32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        expanded = np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)
        for place, vector in np.ndenumerate(codes.registers):
            column, row = place[1], place[4]
            scale = _scale_pair(scales.registers[place])
            for w in range(4):
                word = llvm.extractelement(mgpu.utils.bitcast(vector, words), _constant(w))
                result = llvm.StructType.get_literal((i32,) * 4)
                pairs = llvm.inline_asm(result, [word, scale], _EXPAND, "=r,=r,=r,=r,r,r")
                for j in range(4):
                    bits = llvm.extractvalue(i32, pairs, (j,))
                    target = (0, 16 * column + 4 * w + j, 0, 0, row, 0, 0, 0, 0)
                    expanded[target] = mgpu.utils.bitcast(bits, pair)
        return mgpu.FragmentedArray(_registers=expanded, _layout=layout.to_mgpu(), _is_signed=None)

    return registers(codes, scales)  # pyright: ignore[reportCallIssue]


def expand_interpreted(
    codes: UInt8[Array, "64 K_half"], scales: UInt8[Array, "64 K_groups"]
) -> BFloat16[Array, "64 K"]:
    """`expand` in array operations, for the interpreter."""
    shifted = jnp.where(scales > SCALE_SHIFT, scales - jnp.uint8(SCALE_SHIFT), jnp.uint8(0))
    return fragment_order(dequantize(codes, shifted, jnp.bfloat16))


def _scale_pair(register: Any) -> ir.Value:
    """Return two bfloat16 2**(scale - 1 - SCALE_SHIFT) in one word; infinite if out of range."""
    i32 = ir.IntegerType.get_signless(32)
    scale = arith.extui(i32, llvm.extractelement(register, _constant(0)))
    scale = arith.minui(scale, _constant(_MAX_SCALE + 1))
    exponent = arith.addi(scale, _constant(_SCALE_OFFSET))
    return arith.muli(exponent, _constant(_BOTH_HALVES << 7))


def _constant(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))
