"""What the mesh benchmarks measure: groups of cases, and the sizes of each. Never imports jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Section = Literal["tails", "collectives", "dispatch", "steps", "layers", "model"]
# One process that drives all devices; one process a device; one device alone.
Layout = Literal["one_process", "process_per_gpu", "one_gpu"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
TAIL_FORMS = ("all_reduce", "columns", "folded")
FUSED = "fused"  # the tail that is a kernel: for one process, and few tokens
FUSED_TOKENS = 32
DISPATCH_FORMS = ("all_gather", "all_to_all", "ragged")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cases that share the processes of one layout.

    Attributes:
      limit_s: until when the processes must be done, from their start.
      ranks: devices of the layouts that use several.
      form: the only form of a tail or a dispatch, or the only truncation, that is measured; None
        for all.
      most_layers: of the section `model`.
    """

    section: Section
    layout: Layout
    limit_s: float
    ranks: int = 2
    form: str | None = None
    most_layers: int = 12

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.section, self.form, self.layout)))

    @property
    def num_devices(self) -> int:
        return 1 if self.layout == "one_gpu" else self.ranks

    @property
    def num_processes(self) -> int:
        return self.num_devices if self.layout == "process_per_gpu" else 1

    @property
    def devices_per_process(self) -> int:
        return self.num_devices // self.num_processes

    @property
    def tail_forms(self) -> tuple[str, ...]:
        return TAIL_FORMS if self.form is None else (self.form,)

    @property
    def dispatch_forms(self) -> tuple[str, ...]:
        return DISPATCH_FORMS if self.form is None else (self.form,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all cases.

    Attributes:
      hidden, latent: widths of the residual stream and of the experts' input.
      tail_tokens: token counts of the MoE tail; from `large_tokens` on, all chains are shorter.
      collective_bytes: of the whole array of bare collectives.
      dispatch_tokens: tokens of one rank; `expert_tokens` of these with real experts.
      chain, exchange_chain, large_chain, expert_chain: dependent operations in one call.
      base: layers of the shortest truncated model, in order: K for KDA, M for MLA.
      rows: of decode steps, each with `context_tokens` tokens.
      prefill_tokens: of one prompt.
      chain_s, step_s: how long to repeat a case. most_samples: and how often at most.
      model: keys of the released text config that are replaced.
    """

    hidden: int
    latent: int
    expert_hidden: int
    num_experts: int
    num_choices: int
    tail_tokens: Sequence[int]
    collective_bytes: Sequence[int]
    large_tokens: int
    dispatch_tokens: Sequence[int]
    expert_tokens: int
    chain: int
    exchange_chain: int
    large_chain: int
    expert_chain: int
    base: str
    rows: Sequence[int]
    context_tokens: int
    prefill_tokens: Sequence[int]
    page_unit_tokens: int
    chain_s: float
    step_s: float
    most_samples: int
    model: Mapping[str, Any]

    def chain_of(self, tokens: int) -> int:
        """MoE tails in one call at a token count."""
        return self.large_chain if tokens >= self.large_tokens else self.chain

    def exchanges_of(self, tokens: int) -> int:
        """Exchanges in one call at a token count of a rank."""
        return self.large_chain if tokens >= self.large_tokens else self.exchange_chain

    @property
    def truncations(self) -> dict[str, str]:
        """Layers of the shortest model, and of it with one more layer of either kind."""
        return {"base": self.base, "kda": self.base + "K", "mla": self.base + "M"}


K3 = Sizes(
    hidden=7168,
    latent=3584,
    expert_hidden=3072,
    num_experts=896,
    num_choices=16,
    tail_tokens=(1, 8, 32, 128, 512, 2048),
    collective_bytes=(7_168, 28_672, 114_688, 917_504),
    large_tokens=512,
    dispatch_tokens=(8, 64, 512, 4096),
    expert_tokens=64,
    chain=50,
    exchange_chain=20,
    large_chain=10,
    expert_chain=2,
    base="KKM",
    rows=(1, 8, 64),
    context_tokens=8192,
    prefill_tokens=(2048, 8192),
    page_unit_tokens=128,
    chain_s=0.25,
    step_s=0.6,
    most_samples=200,
    model={},
)

# Unequal sizes that a CPU runs in a moment.
SMOKE = Sizes(
    hidden=96,
    latent=64,
    expert_hidden=32,
    num_experts=12,
    num_choices=3,
    tail_tokens=(1, 8),
    collective_bytes=(1_536,),
    large_tokens=8,
    dispatch_tokens=(6,),
    expert_tokens=6,
    chain=3,
    exchange_chain=3,
    large_chain=2,
    expert_chain=2,
    base="M",
    rows=(2,),
    context_tokens=40,
    prefill_tokens=(64,),
    page_unit_tokens=16,
    chain_s=0.05,
    step_s=0.05,
    most_samples=3,
    model={
        "vocab_size": 160,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 56,
        "first_k_dense_replace": 0,
        "q_lora_rank": 18,
        "kv_lora_rank": 22,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "num_experts": 12,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 64,
        "max_position_embeddings": 512,
        "linear_attn_config": {"num_heads": 4, "head_dim": 12},
    },
)

# Sizes of `bench_tp`: steps of decode.
K3_DECODE = dataclasses.replace(
    K3, tail_tokens=(1, 8, 32, 128), collective_bytes=(7_168, 28_672, 114_688),
    dispatch_tokens=(8, 64), prefill_tokens=(),
)  # fmt: skip

SIZES: Mapping[str, Sizes] = {"k3": K3, "k3_decode": K3_DECODE, "smoke": SMOKE}


def text_config(released: Mapping[str, Any], layers: str, sizes: Sizes) -> dict[str, Any]:
    """The released `config.json` cut to a few layers.

    Args:
      layers: K or M for each layer.
    """
    text = {**released["text_config"], **sizes.model, "num_hidden_layers": len(layers)}
    attention = {**released["text_config"]["linear_attn_config"]}
    attention |= sizes.model.get("linear_attn_config", {})
    numbered = list(enumerate(layers, start=1))
    attention["kda_layers"] = [number for number, kind in numbered if kind == "K"]
    attention["full_attn_layers"] = [number for number, kind in numbered if kind == "M"]
    text["linear_attn_config"] = attention
    if sizes.model:
        last = text["vocab_size"] - 1
        text |= {"bos_token_id": last, "eos_token_id": last, "pad_token_id": last}
    return {**released, "text_config": text} | {
        name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
