"""`kda_decode_paged` composed of the operators it replaces: read a page, compute, write a page."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.kda.api import kda_decode
from pallas_kernels.kda.pages import read_states, write_states
from pallas_kernels.numerics import round_to, sigmoid_f32
from pallas_kernels.short_conv import short_conv_step


def kda_decode_paged(
    qkv_S3ND: Float[Array, "S 3 N D"],
    f_SND: Float[Array, "S N D"],
    b_SN: Float[Array, "S N"],
    gate_SND: Float[Array, "S N D"],
    taps_3NDX: Float32[Array, "3 N D X"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    o_norm_D: Float32[Array, " D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    eps: float,
    implementation: str,
) -> tuple[Float[Array, "S N D"], UInt16[Array, "Z P W E"]]:
    """See `paged.kda_decode_paged`; `implementation` is that of the parts."""
    num_rows, _, heads, dim = qkv_S3ND.shape
    taps_KX = taps_3NDX.reshape(-1, taps_3NDX.shape[-1])
    window_shape = (taps_KX.shape[1] - 1, 3, heads, dim)
    window, state, pool_ZPWE = read_states(
        pool_ZPWE, source_S, window_shape, qkv_S3ND.dtype, position=position
    )
    with jax.named_scope("conv"):
        window_SXhK = window.reshape(num_rows, window_shape[0], -1)
        qkv_SK, window_SXhK = short_conv_step(
            qkv_S3ND.reshape(num_rows, -1), taps_KX, window_SXhK, implementation=implementation
        )
        q, k, v = jnp.unstack(qkv_SK.reshape(qkv_S3ND.shape), axis=1)
    with jax.named_scope("delta"):
        o_SND, state = kda_decode(
            q, k, v, f_SND, b_SN, A_log_N, dt_bias_ND, state,
            lower_bound=lower_bound, implementation=implementation,
        )  # fmt: skip
    window = window_SXhK.reshape(window.shape)
    pool_ZPWE = write_states(pool_ZPWE, target_S, window, state, position=position)
    with jax.named_scope("output"):
        y_SND = gated_norm(o_SND, gate_SND, o_norm_D, eps)
        return jnp.where((target_S == 0)[:, None, None], jnp.zeros_like(y_SND), y_SND), pool_ZPWE


def gated_norm(
    o_SND: Float[Array, "S N D"],
    gate_SND: Float[Array, "S N D"],
    o_norm_D: Float32[Array, " D"],
    eps: float,
) -> Float[Array, "S N D"]:
    """Return o * rsqrt(mean o^2 + eps) * o_norm * sigmoid(gate), in the compute dtype."""
    o_f32 = o_SND.astype(jnp.float32)
    variance_SN1 = jnp.mean(o_f32**2, axis=-1, keepdims=True)
    normed_SND = o_f32 * lax.rsqrt(variance_SN1 + eps) * o_norm_D[None, None]
    return round_to(normed_SND * sigmoid_f32(gate_SND), o_SND.dtype)
