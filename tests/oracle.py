"""A float64 NumPy K3, written from the equations and for one whole sequence: no pages, no chunks,
no shards.

It shares no code with the model: tokens run through KDA one at a time, attention is a full matrix,
experts are a double loop, and AttnRes keeps every sublayer's source.
"""

from __future__ import annotations

import numpy as np

from k3jax.config import ModelConfig

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def forward(
    cfg: ModelConfig, params: dict, tokens: np.ndarray, *, mixtures: list[np.ndarray] | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits `[T, V]` of one sequence, and the residual stream after each layer.

    Args:
      mixtures: gets what the attention residual behind each layer makes of it.
    """
    tree = {part: {k: np.asarray(v).astype(np.float64) if v.dtype != np.uint8 else np.asarray(v)
                   for k, v in leaves.items()} for part, leaves in params.items()}  # fmt: skip
    top, norms = tree["top"], tree["norms"]
    prefix, bank, stream = top["embed"][tokens], [], []
    block = cfg.attn_res_block_layers
    for i in range(cfg.num_layers):
        h = prefix
        if block and bank:
            h = _mix([*bank, prefix], norms["attn_res_norm"][i], norms["attn_res_proj"][i], cfg)
        if mixtures is not None and i:
            mixtures.append(h)
        starts = bool(block) and i % block == 0
        if starts:
            bank.append(prefix.copy())
        x = _rms(h, norms["input"][i], cfg.rms_norm_eps)
        if i in cfg.kda_layers:
            out = _kda(cfg, {k: v[cfg.kda_layers.index(i)] for k, v in tree["kda"].items()}, x)
        else:
            out = _mla(cfg, {k: v[cfg.mla_layers.index(i)] for k, v in tree["mla"].items()}, x)
        prefix = out if starts else prefix + out
        h = prefix
        if block:
            h = _mix([*bank, prefix], norms["mlp_res_norm"][i], norms["mlp_res_proj"][i], cfg)
        x = _rms(h, norms["post_attention"][i], cfg.rms_norm_eps)
        if i < cfg.num_dense_layers:
            dense = tree["dense"]
            prefix = prefix + _glu(cfg, x, dense["gate_up"][i], dense["down"][i])
        else:
            layer = i - cfg.num_dense_layers
            prefix = prefix + _moe(cfg, {k: v[layer] for k, v in tree["moe"].items()}, x)
        stream.append(prefix.copy())
    y = prefix
    if block:
        y = _mix([*bank, prefix], top["output_res_norm"], top["output_res_proj"], cfg)
    if mixtures is not None:
        mixtures.append(y)
    return _rms(y, top["norm"], cfg.rms_norm_eps) @ top["lm_head"].T, stream


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _mix(
    sources: list[np.ndarray], norm: np.ndarray, proj: np.ndarray, cfg: ModelConfig
) -> np.ndarray:
    stack = np.stack(sources)
    scores = (_rms(stack, norm, cfg.rms_norm_eps) * proj).sum(-1)
    weights = np.exp(scores - scores.max(0))
    return ((weights / weights.sum(0))[..., None] * stack).sum(0)


def _act(cfg: ModelConfig, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if cfg.situ_beta is None:
        return gate * _sigmoid(gate) * up
    if cfg.situ_linear_beta is not None:
        up = cfg.situ_linear_beta * np.tanh(up / cfg.situ_linear_beta)
    return cfg.situ_beta * np.tanh(gate / cfg.situ_beta) * _sigmoid(gate) * up


def _glu(cfg: ModelConfig, x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return _act(cfg, x @ gate_up[0].T, x @ gate_up[1].T) @ down.T


def _kda(cfg: ModelConfig, w: dict, x: np.ndarray) -> np.ndarray:
    length, heads, dim = len(x), cfg.kda_num_heads, cfg.kda_head_dim
    raw = np.stack([x @ w["qkv"][s].T for s in range(3)])
    padded = np.concatenate([np.zeros((3, cfg.conv_width - 1, raw.shape[2])), raw], axis=1)
    conv = sum(padded[:, j : j + length] * w["conv"][:, None, :, j] for j in range(cfg.conv_width))
    q, k, v = (conv * _sigmoid(conv)).reshape(3, length, heads, dim)
    f = (x @ w["f_a"].T @ w["f_b"].T).reshape(length, heads, dim)
    beta = _sigmoid(x @ w["b"].T)
    pre = f + w["dt_bias"].reshape(heads, dim)
    rate = np.exp(w["A_log"])[:, None]
    if cfg.gate_lower_bound is None:
        decay = -rate * np.log1p(np.exp(pre))
    else:
        decay = cfg.gate_lower_bound * _sigmoid(rate * pre)
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * dim**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    state, o = np.zeros((heads, dim, dim)), np.zeros_like(v)
    for t in range(length):
        state = np.exp(decay[t])[..., None] * state
        error = beta[t][:, None] * (v[t] - np.einsum("nkv,nk->nv", state, k[t]))
        state = state + k[t][..., None] * error[:, None]
        o[t] = np.einsum("nkv,nk->nv", state, q[t])
    gate = x @ w["g"].T if "g" in w else x @ w["g_a"].T @ w["g_b"].T
    y = _rms(o, w["o_norm"], cfg.rms_norm_eps) * _sigmoid(gate).reshape(o.shape)
    return y.reshape(length, -1) @ w["o"].T


def _mla(cfg: ModelConfig, w: dict, x: np.ndarray) -> np.ndarray:
    length, heads, eps = len(x), cfg.mla_num_heads, cfg.mla_lora_norm_eps
    q = x @ w["q"].T if "q" in w else _rms(x @ w["q_a"].T, w["q_a_norm"], eps) @ w["q_b"].T
    q = q.reshape(length, heads, cfg.qk_head_dim)
    both = x @ w["kv_a"].T
    latent = _rms(both[:, : cfg.kv_lora_rank], w["kv_a_norm"], eps)
    kv = (latent @ w["kv_b"].T).reshape(length, heads, -1)
    shared = np.repeat(both[:, None, cfg.kv_lora_rank :], heads, axis=1)
    k = np.concatenate([kv[..., : cfg.qk_nope_head_dim], shared], -1)
    scores = np.einsum("tnd,snd->nts", q, k) * cfg.qk_head_dim**-0.5
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    att = np.einsum("nts,snv->tnv", weights, kv[..., cfg.qk_nope_head_dim :]).reshape(length, -1)
    if "g" in w:
        att = att * _sigmoid(x @ w["g"].T)
    return att @ w["o"].T


def _moe(cfg: ModelConfig, w: dict, x: np.ndarray) -> np.ndarray:
    if cfg.expert_format == "mxfp4":
        w = {
            **w,
            "w13": _unpack(w["w13_codes"], w["w13_scales"]),
            "w2": _unpack(w["w2_codes"], w["w2_scales"]),
        }
    scores = _sigmoid(x @ w["router"].T)
    z = x @ w["latent_down"].T if cfg.has_latent_moe else x
    agg = np.zeros_like(z)
    for t in range(len(x)):
        ids = np.argsort(-(scores[t] + w["router_bias"]), kind="stable")[: cfg.experts_per_token]
        mixing = scores[t, ids] / (scores[t, ids].sum() + 1e-20 if cfg.renormalize else 1.0)
        for e, p in zip(ids, mixing * cfg.routed_scaling_factor, strict=True):
            agg[t] += p * _glu(cfg, z[t], w["w13"][e], w["w2"][e])
    if cfg.has_latent_norm:
        agg = _rms(agg, w["latent_norm"], cfg.rms_norm_eps)
    routed = agg @ w["latent_up"].T if cfg.has_latent_moe else agg
    return routed + _glu(cfg, x, w["shared_gate_up"], w["shared_down"])


def _unpack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    values = E2M1[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
    return values * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)
