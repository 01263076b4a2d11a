"""The gated NoPE MLA layer in absorbed form over pages (k3-model.md section 2.4).

The cache holds one entry a token, shared by all heads: the normed latent and the unrotated key
part. Queries are multiplied into latent space, so neither prefill nor decode expands the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

from k3jax.config import ModelConfig
from k3jax.layers import Weights, linear, linear_f32, rms_norm
from k3jax.step_meta import StepMeta
from pallas_kernels.mla import mla_decode, mla_prefill, mla_write
from pallas_kernels.numerics import contract, round_to


def mla_attention(
    weights: Weights,
    cfg: ModelConfig,
    x: Float[Array, "T H"],
    pool: UInt16[Array, "Z P W words"],
    meta: StepMeta,
    *,
    layer: int,
    position: int,
) -> tuple[Float[Array, "T H"], UInt16[Array, "Z P W words"]]:
    """One MLA layer on this rank's heads.

    Args:
      x: normed hidden states.
      layer: index in the stacked weights.
      position: layer position of the pool that holds this layer's entries.

    Returns:
      This rank's float32 partial of the output, to be summed over the ranks; and the pool with the
      new entries.
    """
    num_tokens, latent, nope = x.shape[0], cfg.kv_lora_rank, cfg.qk_nope_head_dim
    w = {name: stack[layer] for name, stack in weights.items()}
    with jax.named_scope("mla/project"):
        if cfg.q_lora_rank is None:
            q = linear(x, w["q"])
        else:
            q = linear(
                rms_norm(linear(x, w["q_a"]), w["q_a_norm"], cfg.mla_lora_norm_eps), w["q_b"]
            )
        q_TNK = q.reshape(num_tokens, -1, cfg.qk_head_dim)
        entry = linear(x, w["kv_a"])
        normed = rms_norm(entry[:, :latent], w["kv_a_norm"], cfg.mla_lora_norm_eps)
        entry = jnp.concatenate([normed, entry[:, latent:]], axis=1)
    with jax.named_scope("mla/absorb"):
        kv_b_NKC = w["kv_b"].reshape(-1, nope + cfg.v_head_dim, latent)
        absorbed = contract("tnk,nkc->tnc", q_TNK[..., :nope], kv_b_NKC[:, :nope])
        query = jnp.concatenate([round_to(absorbed, x.dtype), q_TNK[..., nope:]], axis=-1)
    options = {
        "position": position,
        "latent": latent,
        "dtype": x.dtype,
        "scale": cfg.qk_head_dim**-0.5,
    }
    with jax.named_scope("mla/attend"):
        pool = mla_write(pool, entry, meta.token_pages, meta.token_offsets, position=position)
        if meta.kind == "decode" and not meta.num_drafts:
            z = mla_decode(query, pool, meta.attention_pages, meta.context, **options)
        else:
            z = mla_prefill(
                query, pool, meta.attention_pages, meta.computed, meta.row_offsets, **options
            )
    with jax.named_scope("mla/output"):
        att = contract("tnc,nvc->tnv", z, kv_b_NKC[:, nope:])
        att = round_to(att, x.dtype).reshape(num_tokens, -1)
        if cfg.mla_output_gate:
            gate = jax.nn.sigmoid(linear_f32(x, w["g"]))
            att = round_to(att.astype(jnp.float32) * gate, x.dtype)
        return linear_f32(att, w["o"]), pool
