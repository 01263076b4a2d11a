"""Building blocks that every layer uses: declarations, linear maps and norms.

A Flax module here only declares its parameters, from the one description in `k3jax.params`, and
passes them to a pure function. Declared shapes are those of one rank, so `apply` takes the local
arrays inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from k3jax.config import Dtype, ModelConfig
from k3jax.param_spec import ParamSpec
from k3jax.params import describe
from pallas_kernels.numerics import contract, round_to
from sharding.axes import ParallelConfig
from sharding.specs import local_shape

Weights = Mapping[str, Array]

# A single token on a GPU is computed as so many: for a matrix-vector product XLA first copies the
# layer's matrix out of its stack, which takes four times as long (docs/kernels.md).
_TOKENS_FOR_ONE = 8


class Declared(nn.Module):
    """Parameters of one part of the model, stacked over its layers.

    Attributes:
      part: key of the parameter tree.
    """

    part: str
    cfg: ModelConfig
    parallel: ParallelConfig
    dtype: Dtype

    def setup(self) -> None:
        self.weights = {
            name: self.param(
                name,
                initializer(spec),
                local_shape(spec.shape, spec.axes, self.parallel),
                param_dtype(spec, self.dtype),
            )
            for name, spec in describe(self.cfg)[self.part].items()
        }

    def __call__(self) -> Weights:
        return self.weights


def param_dtype(spec: ParamSpec, dtype: Dtype) -> jnp.dtype:
    """Dtype of a parameter on the device."""
    return jnp.dtype(dtype if spec.dtype == "compute" else spec.dtype)


def initializer(spec: ParamSpec) -> nn.initializers.Initializer:
    """Random weights for tests; a trained model is always loaded."""

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        if spec.init in ("ones", "zeros"):
            return jnp.full(shape, spec.init == "ones", dtype)
        if spec.init == "bytes":
            return jax.random.bits(key, shape, jnp.uint8)
        scale = 1.0 if spec.init == "a_log" else shape[-1] ** -0.5
        return (jax.random.normal(key, shape) * scale).astype(dtype)

    return init


def linear(x: Float[Array, "*T i"], w: Float[Array, "o i"]) -> Float[Array, "*T o"]:
    """`x W^T`, accumulated in float32, in the dtype of `x`."""
    return round_to(linear_f32(x, w), x.dtype)


def linear_f32(x: Float[Array, "*T i"], w: Float[Array, "o i"]) -> Float[Array, "*T o"]:
    """`x W^T` in float32."""

    def product(x: Array, w: Array) -> Array:
        return contract("...i,oi->...o", x, w)

    def padded(x: Array, w: Array) -> Array:
        return product(jnp.pad(x, ((0, _TOKENS_FOR_ONE - 1), (0, 0))), w)[:1]

    if x.ndim != 2 or x.shape[0] != 1:
        return product(x, w)
    return lax.platform_dependent(x, w, cuda=padded, default=product)


def add(x: Float[Array, "*T d"], y: Float[Array, "*T d"]) -> Float[Array, "*T d"]:
    """`x + y`, really rounded to their dtype: the residual stream is rounded after every add."""
    return round_to(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def rms_norm(
    x: Float[Array, "*T d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "*T d"]:
    """RMSNorm over the last axis: statistics and gain in float32 (k3-model.md section 2.1)."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    gain = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return round_to(x32 * scale * gain, x.dtype)
