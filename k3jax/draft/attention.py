"""Attention of draft models, up to the softmax: queries, cache entries, output (section 6.4, 6.5).

Both forms cache one entry a token and layer. The entry of a target token comes from its context
vector, that of a token of the block from the layer's input; the arithmetic is the same.

Dims: `C` numbers of an entry, `N` query heads of this rank, `Dq` and `Dz` of a query and a result.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from k3jax.draft.config import DraftConfig, GqaShape, MlaShape
from k3jax.draft.rope import rotate
from k3jax.layers import Weights, linear, linear_f32, rms_norm
from pallas_kernels.numerics import contract, round_to


def queries(
    w: Weights, cfg: DraftConfig, x: Float[Array, "S X H"], positions: Int32[Array, "S X"]
) -> Float[Array, "S X N Dq"]:
    """Queries of a block: absorbed into the latent for MLA (Dq = C), rotated heads for GQA."""
    if isinstance(cfg.attention, GqaShape):
        q = linear(x, w["q"]).reshape(*x.shape[:2], -1, cfg.attention.head_dim)
        q = rms_norm(q, w["q_norm"], cfg.rms_norm_eps)
        return rotate(q, _of_heads(positions, q), cfg.rope)
    shape = cfg.attention
    nope = shape.qk_nope_head_dim
    q = linear(rms_norm(linear(x, w["q_a"]), w["q_a_norm"], cfg.rms_norm_eps), w["q_b"])
    q = q.reshape(*x.shape[:2], -1, nope + shape.qk_rope_head_dim)
    absorbed = contract("sxnk,nkc->sxnc", q[..., :nope], _kv_b(w, shape)[:, :nope])
    rotated = rotate(q[..., nope:], _of_heads(positions, q), cfg.rope)
    return jnp.concatenate([round_to(absorbed, x.dtype), rotated], axis=-1)


def entries(
    w: Weights, cfg: DraftConfig, x: Float[Array, "T H"], positions: Int32[Array, " T"]
) -> Float[Array, "T C"]:
    """Cache entries of tokens: normed latent and rotated shared key, or rotated keys and values."""
    if isinstance(cfg.attention, GqaShape):
        key = linear(x, w["k"]).reshape(x.shape[0], -1, cfg.attention.head_dim)
        key = rms_norm(key, w["k_norm"], cfg.rms_norm_eps)
        key = rotate(key, _of_heads(positions, key), cfg.rope)
        return jnp.concatenate([key.reshape(x.shape[0], -1), linear(x, w["v"])], axis=-1)
    latent = cfg.attention.kv_lora_rank
    entry = linear(x, w["kv_a"])
    normed = rms_norm(entry[:, :latent], w["kv_a_norm"], cfg.rms_norm_eps)
    return jnp.concatenate([normed, rotate(entry[:, latent:], positions, cfg.rope)], axis=-1)


def output(w: Weights, cfg: DraftConfig, z: Float[Array, "S X N Dz"]) -> Float[Array, "S X H"]:
    """This rank's float32 partial of the layer's output, from what the heads attended to."""
    if isinstance(cfg.attention, MlaShape):
        value = _kv_b(w, cfg.attention)[:, cfg.attention.qk_nope_head_dim :]
        z = round_to(contract("sxnc,nvc->sxnv", z, value), z.dtype)
    return linear_f32(z.reshape(*z.shape[:2], -1), w["o"])


def _kv_b(w: Weights, shape: MlaShape) -> Float[Array, "N K C"]:
    """Keys without positions, then values, of every head."""
    return w["kv_b"].reshape(-1, shape.qk_nope_head_dim + shape.v_head_dim, shape.kv_lora_rank)


def _of_heads(positions: Int32[Array, "*lead"], heads: Array) -> Int32[Array, "*lead N"]:
    """The position of each head of a token."""
    return jnp.broadcast_to(positions[..., None], heads.shape[:-1])
