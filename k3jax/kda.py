"""The KDA layer: projections, convolution, delta rule, gated norm (k3-model.md section 2.3)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt16

from k3jax.config import ModelConfig
from k3jax.inputs import EXPORT_TOKENS
from k3jax.layers import Weights, linear, linear_f32, rms_norm
from k3jax.pool import PoolLayout
from k3jax.step_meta import StepMeta
from pallas_kernels.kda import (
    KdaRecords,
    kda_commit_paged,
    kda_decode_paged,
    kda_prefill,
    kda_verify_paged,
    read_states,
    write_states,
)
from pallas_kernels.numerics import round_to, sigmoid_f32
from pallas_kernels.short_conv import short_conv


class KdaTrial(NamedTuple):
    """What one layer computed for tokens that may not stay."""

    records: KdaRecords
    qkv_SX3ND: Float[Array, "S X 3 N D"]
    f_SXND: Float[Array, "S X N D"]
    source_S: Int32[Array, " S"]


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
) -> tuple[Float[Array, "T H"], UInt16[Array, "Z P W words"], KdaTrial | None]:
    """One KDA layer on this rank's heads.

    Args:
      x: normed hidden states.
      layer: index in the stacked weights.
      group, position: recurrent group and layer position that hold this layer's state.

    Returns:
      This rank's float32 partial of the output, to be summed over the ranks; the pool with the new
      states; and in a step with drafts, which leaves the states as they are, what `kda_commit`
      makes the new ones of.
    """
    num_tokens = x.shape[0]
    kept, _, heads, dim = layout.conv_shape
    w = {name: stack[layer] for name, stack in weights.items()}
    # A row without computed tokens starts from zeros whatever its page holds (KF-C02).
    source = jnp.where(meta.computed == 0, 0, meta.state_source[:, group])
    target = meta.state_target[:, group]
    with jax.named_scope("kda/project"):
        qkv = linear(x, w["qkv"].reshape(-1, x.shape[1])).reshape(num_tokens, 3, -1)
        f = linear(linear(x, w["f_a"]), w["f_b"]).reshape(num_tokens, heads, dim)
        b = linear(x, w["b"])
        gate = linear(linear(x, w["g_a"]), w["g_b"]) if "g_a" in w else linear(x, w["g"])
        gate = gate.reshape(num_tokens, heads, dim)
    taps, dt_bias = w["conv"], w["dt_bias"].reshape(heads, dim)
    trial = None
    if meta.num_drafts:
        with jax.named_scope("kda"):
            qkv, f, b, gate = map(
                meta.to_slots, (qkv.reshape(num_tokens, 3, heads, dim), f, b, gate)
            )
            y, records = kda_verify_paged(
                qkv, f, b, gate, taps.reshape(3, heads, dim, -1), w["A_log"], dt_bias, w["o_norm"],
                pool, source, meta.lengths,
                position=position, lower_bound=cfg.gate_lower_bound, eps=cfg.rms_norm_eps,
            )  # fmt: skip
            trial = KdaTrial(records, qkv, f, source)
            y = meta.from_slots(y)
    elif meta.kind == "decode":
        with jax.named_scope("kda"):
            y, pool = kda_decode_paged(
                qkv.reshape(num_tokens, 3, heads, dim), f, b, gate,
                taps.reshape(3, heads, dim, -1), w["A_log"], dt_bias, w["o_norm"],
                pool, source, target,
                position=position, lower_bound=cfg.gate_lower_bound, eps=cfg.rms_norm_eps,
            )  # fmt: skip
    else:
        window, state, pool = read_states(
            pool, source, layout.conv_shape, x.dtype, position=position
        )
        with jax.named_scope("kda/conv"):
            qkv, *windows = short_conv(
                qkv.reshape(num_tokens, -1), taps.reshape(-1, kept + 1),
                window.reshape(window.shape[0], kept, -1), meta.row_offsets, meta.export_tokens,
            )  # fmt: skip
            q, k, v = jnp.unstack(qkv.reshape(num_tokens, 3, heads, dim), axis=1)
        with jax.named_scope("kda/delta"):
            o, *states = kda_prefill(
                q, k, v, f, b, w["A_log"], dt_bias, state, meta.row_offsets, meta.export_tokens,
                lower_bound=cfg.gate_lower_bound, chunk=EXPORT_TOKENS,
            )  # fmt: skip
        # The states after the rows and the exported ones.
        pages = (target, meta.export_pages[:, group])
        for page, window_after, state_after in zip(pages, windows, states, strict=True):
            window = window_after.reshape(window.shape)
            pool = write_states(pool, page, window, state_after, position=position)
        with jax.named_scope("kda/output"):
            normed = rms_norm(o.astype(jnp.float32), w["o_norm"], cfg.rms_norm_eps)
            y = round_to(normed * sigmoid_f32(gate), x.dtype)
    with jax.named_scope("kda/output"):
        return linear_f32(y.reshape(num_tokens, -1), w["o"]), pool, trial


def kda_commit(
    weights: Weights,
    cfg: ModelConfig,
    trial: KdaTrial,
    accepted: Int32[Array, " S"],
    pool: UInt16[Array, "Z P W words"],
    meta: StepMeta,
    *,
    layer: int,
    group: int,
    position: int,
) -> UInt16[Array, "Z P W words"]:
    """Store a layer's states after the accepted tokens of each row (k3-model.md section 6.8).

    Args:
      accepted: tokens of each row that stay, its first one included; 0 for a row not in use.
      weights, meta, layer, group, position: as in `kda_attention`.
    """
    with jax.named_scope("kda/commit"):
        heads, dim = trial.f_SXND.shape[2:]
        return kda_commit_paged(
            trial.records, trial.qkv_SX3ND, trial.f_SXND, weights["A_log"][layer],
            weights["dt_bias"][layer].reshape(heads, dim), pool, trial.source_S,
            meta.state_target[:, group], accepted,
            position=position, lower_bound=cfg.gate_lower_bound, taps=cfg.conv_width,
        )  # fmt: skip
