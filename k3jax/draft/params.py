"""The parameters of a draft model and their released names (k3-model.md section 6.3).

Letters as in `k3jax.params`; `B` tapped layers, `R` rank of the Markov head.
"""

from __future__ import annotations

from k3jax.draft.config import DraftConfig, GqaShape, MlaShape
from k3jax.param_spec import ParamSpec, ParamTree, Source, glu, matrix, vector

# What the two formats call the projection and norm of the context, and the last norm.
_MLA_NAMES = ("context_proj.weight", "context_norm.weight", "final_norm.weight")
_GQA_NAMES = ("fc.weight", "hidden_norm.weight", "norm.weight")


def draft_tree(cfg: DraftConfig) -> ParamTree:
    """Module name -> parameter name -> description."""
    layers, hidden, vocab = tuple(range(cfg.num_layers)), cfg.hidden_size, cfg.vocab_size
    proj, norm, last = _MLA_NAMES if isinstance(cfg.attention, MlaShape) else _GQA_NAMES
    taps = len(cfg.tap_layers) * cfg.target_hidden_size
    tree = {
        "context": {
            "proj": ParamSpec((hidden, taps), (None, None), (Source(proj),)),
            "norm": ParamSpec((hidden,), (None,), (Source(norm),), init="ones"),
        },
        "norms": {
            name: vector(layers, f"layers.{{layer}}.{name}_layernorm.weight", hidden)
            for name in ("input", "post_attention")
        },
        "attention": _mla(cfg, cfg.attention, layers)
        if isinstance(cfg.attention, MlaShape)
        else _gqa(cfg, cfg.attention, layers),
        "mlp": glu(layers, "mlp", hidden, cfg.intermediate_size, prefix="layers.{layer}."),
        "top": {"norm": ParamSpec((hidden,), (None,), (Source(last),), init="ones")},
        "markov": {
            "w1": ParamSpec(
                (vocab, cfg.markov_rank), (None, None), (Source("markov_head.markov_w1.weight"),)
            ),
            "w2": ParamSpec(
                (vocab, cfg.markov_rank), ("vocab", None), (Source("markov_head.markov_w2.weight"),)
            ),
        },
    }
    if cfg.has_own_vocab:
        for name, file in (("embed", "embed_tokens"), ("lm_head", "lm_head")):
            tree["top"][name] = ParamSpec(
                (vocab, hidden), ("vocab", None), (Source(f"{file}.weight"),)
            )
    if cfg.has_confidence:
        tree["confidence"] = {
            "proj": ParamSpec(
                (hidden + cfg.markov_rank,),
                (None,),
                (Source("confidence_head.proj.weight", convert="squeeze_row"),),
            ),
            "bias": ParamSpec((1,), (None,), (Source("confidence_head.proj.bias"),), init="zeros"),
        }
    return tree


def _mla(cfg: DraftConfig, shape: MlaShape, layers: tuple[int, ...]) -> dict[str, ParamSpec]:
    attn, hidden, heads = "layers.{layer}.self_attn.", cfg.hidden_size, cfg.num_heads
    q_out = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    kv_out = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    rank, latent = shape.q_lora_rank, shape.kv_lora_rank
    kv_a = attn + "kv_a_proj_with_mqa.weight"
    return {
        "q_a": matrix(layers, attn + "q_a_proj.weight", (rank, None), (hidden, None)),
        "q_a_norm": vector(layers, attn + "q_a_layernorm.weight", rank),
        "q_b": matrix(layers, attn + "q_b_proj.weight", (q_out, "heads"), (rank, None)),
        "kv_a": matrix(layers, kv_a, (shape.entry_width, None), (hidden, None)),
        "kv_a_norm": vector(layers, attn + "kv_a_layernorm.weight", latent),
        "kv_b": matrix(layers, attn + "kv_b_proj.weight", (kv_out, "heads"), (latent, None)),
        "o": matrix(
            layers, attn + "o_proj.weight", (hidden, None), (heads * shape.v_head_dim, "heads")
        ),
    }


def _gqa(cfg: DraftConfig, shape: GqaShape, layers: tuple[int, ...]) -> dict[str, ParamSpec]:
    attn, hidden, dim = "layers.{layer}.self_attn.", cfg.hidden_size, shape.head_dim
    q_width, kv_width = cfg.num_heads * dim, shape.num_kv_heads * dim
    return {
        "q": matrix(layers, attn + "q_proj.weight", (q_width, "heads"), (hidden, None)),
        "k": matrix(layers, attn + "k_proj.weight", (kv_width, "heads"), (hidden, None)),
        "v": matrix(layers, attn + "v_proj.weight", (kv_width, "heads"), (hidden, None)),
        "o": matrix(layers, attn + "o_proj.weight", (hidden, None), (q_width, "heads")),
        "q_norm": vector(layers, attn + "q_norm.weight", dim),
        "k_norm": vector(layers, attn + "k_norm.weight", dim),
    }
