"""The KDA layer: projections, convolution, delta rule, gated norm (k3-model.md section 2.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

from k3jax.config import ModelConfig
from k3jax.inputs import EXPORT_TOKENS
from k3jax.layers import Weights, linear, linear_f32, rms_norm
from k3jax.pool import PoolLayout, read_states, write_states
from k3jax.step_meta import StepMeta
from pallas_kernels.kda import kda_decode, kda_prefill
from pallas_kernels.numerics import contract, round_to, sigmoid_f32
from pallas_kernels.short_conv import short_conv, short_conv_step


def kda_attention(
    weights: Weights,
    cfg: ModelConfig,
    x: Float[Array, "T H"],
    pool: UInt16[Array, "Z P W words"],
    meta: StepMeta,
    layout: PoolLayout,
    *,
    layer: int,
    group: int,
    position: int,
) -> tuple[Float[Array, "T H"], UInt16[Array, "Z P W words"]]:
    """One KDA layer on this rank's heads.

    Args:
      x: normed hidden states.
      layer: index in the stacked weights.
      group, position: recurrent group and layer position that hold this layer's state.

    Returns:
      This rank's float32 partial of the output, to be summed over the ranks; and the pool with the
      new states.
    """
    num_tokens = x.shape[0]
    _, _, heads, dim = layout.conv_shape
    w = {name: stack[layer] for name, stack in weights.items()}
    conv_S, state_S, pool = read_states(
        layout, pool, meta.state_source[:, group], meta.computed == 0, position=position
    )
    with jax.named_scope("kda/project"):
        qkv = round_to(contract("th,sch->tsc", x, w["qkv"]), x.dtype).reshape(num_tokens, -1)
        f = linear(linear(x, w["f_a"]), w["f_b"]).reshape(num_tokens, heads, dim)
        b = linear(x, w["b"])
        gate = linear(linear(x, w["g_a"]), w["g_b"]) if "g_a" in w else linear(x, w["g"])
    taps = w["conv"].reshape(-1, cfg.conv_width)
    history = conv_S.reshape(conv_S.shape[0], conv_S.shape[1], -1)
    dt_bias = w["dt_bias"].reshape(heads, dim)
    with jax.named_scope("kda/conv"):
        if meta.kind == "decode":
            qkv, *histories = short_conv_step(qkv, taps, history)
        else:
            rows = (meta.row_offsets, meta.export_tokens)
            qkv, *histories = short_conv(qkv, taps, history, *rows)
    q, k, v = (part[:, 0] for part in jnp.split(qkv.reshape(num_tokens, 3, heads, dim), 3, axis=1))
    with jax.named_scope("kda/delta"):
        if meta.kind == "decode":
            o, *states = kda_decode(
                q, k, v, f, b, w["A_log"], dt_bias, state_S, lower_bound=cfg.gate_lower_bound
            )
        else:
            o, *states = kda_prefill(
                q, k, v, f, b, w["A_log"], dt_bias, state_S, meta.row_offsets, meta.export_tokens,
                lower_bound=cfg.gate_lower_bound, chunk=EXPORT_TOKENS,
            )  # fmt: skip
    # The states after the rows; from prefill, the exported ones as well.
    targets = (meta.state_target, meta.export_pages)[: len(states)]
    for pages, history, state_S in zip(targets, histories, states, strict=True):
        conv_S = history.reshape(conv_S.shape)
        pool = write_states(layout, pool, pages[:, group], conv_S, state_S, position=position)
    with jax.named_scope("kda/output"):
        normed = rms_norm(o.astype(jnp.float32), w["o_norm"], cfg.rms_norm_eps)
        gate = sigmoid_f32(gate).reshape(num_tokens, heads, dim)
        y = round_to(normed * gate, x.dtype).reshape(num_tokens, -1)
        return linear_f32(y, w["o"]), pool
