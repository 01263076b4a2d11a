"""The two numeric conventions every operator shares: how to round and how to contract."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

COMPUTE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def round_to(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Round `x` to `dtype` (float32 or bfloat16), to nearest even.

    A bare `astype` to bfloat16 may be dropped when a cast back follows; `reduce_precision` may not.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def contract(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """Einsum that accumulates in float32 and returns float32.

    float32 operands are multiplied in full float32: the default precision of a GPU or TPU would
    round them first. A CPU gets bfloat16 operands widened, which changes no product: XLA:CPU
    cannot run some bfloat16 dots with a float32 result.
    """
    if all(operand.dtype == jnp.float32 for operand in operands):
        return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)

    def widened(*operands: Array) -> Array:
        return jnp.einsum(spec, *(operand.astype(jnp.float32) for operand in operands))

    def native(*operands: Array) -> Array:
        return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)

    return lax.platform_dependent(*operands, cpu=widened, default=native)


def sigmoid_f32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sigmoid of `x`, evaluated and returned in float32."""
    return jax.nn.sigmoid(x.astype(jnp.float32))
