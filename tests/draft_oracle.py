"""A float64 NumPy DSpark draft, from the equations of k3-model.md section 6: heads expanded, tokens
and heads in loops. It shares no code with the model."""

from __future__ import annotations

import math

import numpy as np

from k3jax.draft.config import DraftConfig, GqaShape


def block(
    cfg: DraftConfig,
    params: dict,
    taps: np.ndarray,
    embedded: np.ndarray,
) -> np.ndarray:
    """Hidden states `[X, H]` of a block whose anchor follows the tokens of `taps` `[T, BH]`."""
    p = {part: {k: np.asarray(v, np.float64) for k, v in leaves.items()}
         for part, leaves in params.items()}  # fmt: skip
    eps, anchor = cfg.rms_norm_eps, len(taps)
    context = _rms(taps @ p["context"]["proj"].T, p["context"]["norm"], eps)
    h = embedded.astype(np.float64)
    for j in range(cfg.num_layers):
        w = {name: leaf[j] for name, leaf in p["attention"].items()}
        x = _rms(h, p["norms"]["input"][j], eps)
        keys, values = [], []
        for position, source in enumerate([*context, *x]):
            key, value = _key_value(cfg, w, source, position)
            keys.append(key)
            values.append(value)
        heads = []
        for n, row in enumerate(x):
            query = _query(cfg, w, row, anchor + n)
            seen = [
                t for t in range(anchor + len(x))
                if (t < anchor and (cfg.window is None or t >= anchor - cfg.window))
                or (t >= anchor and (not cfg.is_causal or t <= anchor + n))
            ]  # fmt: skip
            out = []
            for head, q in enumerate(query):
                score = np.array([q @ keys[t][head] for t in seen]) * cfg.softmax_scale
                weight = np.exp(score - score.max())
                weight /= weight.sum()
                out.append(sum(a * values[t][head] for a, t in zip(weight, seen, strict=True)))
            heads.append(np.concatenate(out))
        h = h + np.stack(heads) @ w["o"].T
        x = _rms(h, p["norms"]["post_attention"][j], eps)
        gate, up = (x @ m.T for m in p["mlp"]["gate_up"][j])
        h = h + (gate / (1 + np.exp(-gate)) * up) @ p["mlp"]["down"][j].T
    return _rms(h, p["top"]["norm"], eps)


def _key_value(cfg: DraftConfig, w: dict, x: np.ndarray, position: int) -> tuple[list, list]:
    """Key and value of every query head."""
    shape = cfg.attention
    if isinstance(shape, GqaShape):
        keys = (w["k"] @ x).reshape(shape.num_kv_heads, -1)
        keys = [_turn(cfg, _rms(k, w["k_norm"], cfg.rms_norm_eps), position) for k in keys]
        values = list((w["v"] @ x).reshape(shape.num_kv_heads, -1))
        group = cfg.num_heads // shape.num_kv_heads
        return [k for k in keys for _ in range(group)], [v for v in values for _ in range(group)]
    both = w["kv_a"] @ x
    latent = _rms(both[: shape.kv_lora_rank], w["kv_a_norm"], cfg.rms_norm_eps)
    shared = _turn(cfg, both[shape.kv_lora_rank :], position)
    per_head = (w["kv_b"] @ latent).reshape(cfg.num_heads, -1)
    nope = shape.qk_nope_head_dim
    return [np.concatenate([k[:nope], shared]) for k in per_head], [k[nope:] for k in per_head]


def _query(cfg: DraftConfig, w: dict, x: np.ndarray, position: int) -> list[np.ndarray]:
    shape = cfg.attention
    if isinstance(shape, GqaShape):
        heads = (w["q"] @ x).reshape(cfg.num_heads, -1)
        return [_turn(cfg, _rms(q, w["q_norm"], cfg.rms_norm_eps), position) for q in heads]
    q = w["q_b"] @ _rms(w["q_a"] @ x, w["q_a_norm"], cfg.rms_norm_eps)
    nope = shape.qk_nope_head_dim
    return [
        np.concatenate([head[:nope], _turn(cfg, head[nope:], position)])
        for head in q.reshape(cfg.num_heads, -1)
    ]


def _rms(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def _turn(cfg: DraftConfig, x: np.ndarray, position: int) -> np.ndarray:
    """Rotary position of one vector, as complex numbers."""
    rope, pairs = cfg.rope, len(x) // 2
    z = x[0::2] + 1j * x[1::2] if rope.is_interleaved else x[:pairs] + 1j * x[pairs:]
    for i in range(pairs):
        frequency = rope.theta ** (-2 * i / rope.dim)
        if rope.yarn is not None:
            y = rope.yarn
            turns = [
                rope.dim
                * math.log(y.original_tokens / (2 * math.pi * b))
                / 2
                / math.log(rope.theta)
                for b in (y.beta_fast, y.beta_slow)
            ]
            low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), rope.dim - 1)
            ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
            frequency *= ramp / y.factor + (1 - ramp)
        z[i] *= np.exp(1j * position * frequency)
    if rope.is_interleaved:
        return np.stack([z.real, z.imag], axis=-1).reshape(-1)
    return np.concatenate([z.real, z.imag])
