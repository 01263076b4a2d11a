"""Decays inside `prefill_prepare`: the gates, and which of them the sums include.

Sums of gates g, in base 2, are products with matrices of zeros and ones on the tensor cores, on g
rounded to float16 (scaled, so that small gates are not subnormal): every sum has the relative error
of one rounding, 2^-12, and all are sums of the same numbers. With G(i) the sum through token i, a
factor 2^(G(i) - G(j)) is split between the operands of a product. Inside a sub-block of 32 tokens
both count from its first token and half of the largest possible exponent, 31 * 5 * log2(e), goes to
either side, so that none overflows: keys and queries must be smaller than 2^15. Across the two sub-
blocks they meet at token 32, where neither grows. Entries above the diagonal may overflow; they are
masked by selection. No sum sees a gate behind the row that uses it (KF-K01).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float16, Float32

from pallas_kernels.kda.prefill_tiles import CHUNK, F16

LOWEST_BOUND = -5.0  # of the log decays; SHIFT relies on it
SUB = 32  # tokens of a sub-block
SHIFT = 112.0  # bits, about (SUB - 1) * 5 * log2(e) / 2

_GATE_SCALE = 2.0**10
PER_BIT = 1.0 / _GATE_SCALE  # a sum of scaled gates to bits

# Which tokens (columns) the sums of each row include, and eight rows that include all.
_ROW, _COLUMN = np.indices((CHUNK, CHUNK))
WITHIN, TO_MIDDLE, FROM_START, TO_END = range(4)
SUMS = np.stack(
    [
        (_COLUMN <= _ROW) & (_COLUMN > _ROW // SUB * SUB),  # from a sub-block's second token on
        (_COLUMN > _ROW) & (_COLUMN <= SUB),
        _COLUMN <= _ROW,
        _COLUMN > _ROW,
    ]
).astype(np.float16)
ALL = np.ones((8, CHUNK), np.float16)


def scaled_gate(x: Float32[Array, "..."], lower_bound: float) -> Float16[Array, "..."]:
    """Return lower_bound / (1 + 2^x), in base 2 and scaled.

    The quotient is a power of two: a division takes long, and a sigmoid by tanh has no relative
    accuracy for small values.
    """
    scale = lower_bound * math.log2(math.e) * _GATE_SCALE
    return (jnp.exp2(-jnp.log2(1.0 + jnp.exp2(x))) * scale).astype(F16)
