"""Configuration of the model, the cache and the engine. Never imports jax.

`ModelConfig.from_hf` reads the `config.json` of a released checkpoint (k3-model.md section 1) and
refuses what it does not understand: a key that nobody reads may change the mathematics of the model
without an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from pallas_kernels.settings import AUTOMATIC, KernelSettings
from sharding.axes import Experts, ParallelConfig

Dtype = Literal["bfloat16", "float32"]
DraftSampling = Literal["greedy", "probabilistic"]
MXFP4_GROUP = 32  # weights that share a scale, along the input
MAX_DRAFTS = 7  # verified with the token before them in one step
DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}


class ConfigError(ValueError):
    """The start-up configuration is wrong. Carries every problem that was found, one a line."""

    def __init__(self, problems: str | list[str] | tuple[str, ...]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a Kimi K3 or Kimi-Linear text decoder. Layer indices are 0-based.

    Attributes:
      family: `kimi_k3` (nested config, `language_model.` prefix) or `kimi_linear`.
      kda_layers, mla_layers: a partition of `range(num_layers)`.
      num_dense_layers: the first layers, whose feed-forward network is dense.
      latent_size: width of the routed experts' input and output; `hidden_size` when
        `has_latent_moe` is false.
      attn_res_block_layers: layers in an attention-residual block, or None for plain residual adds.
      gate_lower_bound: of the KDA log-decay, or None for the softplus form.
      situ_beta: None when the activation is SwiGLU. situ_linear_beta: None leaves the up branch
        unclipped.
      mla_lora_norm_eps: of `q_a_layernorm` and `kv_a_layernorm`, which the released code builds
        without `rms_norm_eps` (k3-model.md section 2.1).
      expert_format: how the routed experts are stored, in the file and on the device.
    """

    family: Literal["kimi_k3", "kimi_linear"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_dense_layers: int
    max_position_tokens: int
    rms_norm_eps: float
    mla_lora_norm_eps: float = 1e-6
    situ_beta: float | None
    situ_linear_beta: float | None
    # KDA
    kda_layers: tuple[int, ...]
    kda_num_heads: int
    kda_head_dim: int
    conv_width: int
    kda_full_rank_gate: bool
    gate_lower_bound: float | None
    # MLA
    mla_layers: tuple[int, ...]
    mla_num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    # MoE
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    latent_size: int
    has_latent_moe: bool
    has_latent_norm: bool
    num_expert_groups: int
    topk_groups: int
    renormalize: bool
    routed_scaling_factor: float
    expert_format: Literal["dense", "mxfp4"]
    # residuals
    attn_res_block_layers: int | None
    # token ids
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def __post_init__(self) -> None:
        problems = _check_model(self)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a released `config.json`.

        Args:
          config: the parsed file of a `kimi_k3` or a `kimi_linear` checkpoint.

        Raises:
          ConfigError: a key is missing, unknown, or has a value that this model does not implement.
        """
        from k3jax import hf_config

        return cls(**hf_config.parse(config))

    @property
    def kda_width(self) -> int:
        """Heads times head dim of KDA (`ND`)."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Query and key width of an MLA head: the unrotated "rope" dims take part in the score."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_entry_width(self) -> int:
        """Numbers that MLA caches per token and layer: normed latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_dense_layers))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_dense_layers, self.num_layers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size of the page pool.

    Attributes:
      page_tokens: tokens in a page, from the four-step alignment.
      num_pages: pages of the pool, the null page 0 included.
    """

    page_tokens: int
    num_pages: int

    def __post_init__(self) -> None:
        problems = []
        if self.page_tokens < 1:
            problems.append(f"page_tokens is out of range: got {self.page_tokens}; expected >= 1")
        if self.num_pages < 2:
            problems.append(
                f"num_pages is too small: got {self.num_pages}; expected >= 2 (page 0 is the null "
                "page)"
            )
        if problems:
            raise ConfigError(problems)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Precision, budgets and kernels of the serving loop.

    Attributes:
      dtype: of activations, dense weights and the MLA cache. KDA state is always float32.
      max_rows: requests that run at once.
      max_context_tokens: prompt plus output of one request.
      max_prefill_tokens: tokens of one prefill step.
      max_prefill_rows: requests that share one prefill step.
      num_drafts: drafts that are verified behind a row's token, at most; 0 decodes without.
      draft_sampling: whether a draft model takes its likeliest tokens or, at a temperature, draws
        them.
      kernels: which implementations the operators take.
    """

    dtype: Dtype = "bfloat16"
    max_rows: int = 8
    max_context_tokens: int = 4096
    max_prefill_tokens: int = 256
    max_prefill_rows: int = 4
    num_drafts: int = 0
    draft_sampling: DraftSampling = "greedy"
    kernels: KernelSettings = AUTOMATIC

    def __post_init__(self) -> None:
        problems = []
        if self.dtype not in DTYPE_BYTES:
            problems.append(
                f"dtype is unknown: got {self.dtype!r}; expected one of {sorted(DTYPE_BYTES)}"
            )
        for name in ("max_rows", "max_context_tokens", "max_prefill_tokens", "max_prefill_rows"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is out of range: got {getattr(self, name)}; expected >= 1")
        if self.max_prefill_rows > self.max_rows:
            problems.append(
                f"max_prefill_rows is too large: got {self.max_prefill_rows}; expected <= max_rows "
                f"{self.max_rows}"
            )
        if not 0 <= self.num_drafts <= MAX_DRAFTS:
            problems.append(
                f"num_drafts is out of range: got {self.num_drafts}; expected 0 to {MAX_DRAFTS}"
            )
        if problems:
            raise ConfigError(problems)


def validate(cfg: ModelConfig, parallel: ParallelConfig, engine: EngineConfig) -> None:
    """Check what only the combination of configurations can tell.

    Raises:
      ConfigError: listing every problem at once, with its values.
    """
    problems = _check_mesh(cfg, parallel)
    if parallel.shard_tokens == "on":
        problems += _check_sharded_tokens(parallel, engine)
    if engine.max_context_tokens > cfg.max_position_tokens:
        problems.append(
            f"max_context_tokens is beyond the model: got {engine.max_context_tokens}; expected at "
            f"most {cfg.max_position_tokens}"
        )
    if problems:
        raise ConfigError(problems)


def _check_mesh(cfg: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Every dim that does not divide over the mesh (k3-model.md section 5.1).

    Heads and columns are split over `tp`, experts over all ranks.
    """
    over_tp = {
        "num_attention_heads": cfg.mla_num_heads,
        "linear_attn_config.num_heads": cfg.kda_num_heads,
        "vocab_size": cfg.vocab_size,
    }
    if cfg.moe_layers:
        over_tp["width of the shared experts"] = cfg.shared_intermediate_size
    if cfg.dense_layers:
        over_tp["intermediate_size"] = cfg.intermediate_size
    problems = [
        f"{name} does not divide over the mesh: got {size}; expected a multiple of tp{parallel.tp}"
        for name, size in over_tp.items()
        if size % parallel.tp
    ]
    if not cfg.moe_layers:
        return problems
    problem = _check_experts(cfg, parallel)
    if problem is not None:
        other: Experts = "tp" if parallel.experts == "ep" else "ep"
        fits = _check_experts(cfg, dataclasses.replace(parallel, experts=other)) is None
        problems.append(f"{problem}, or experts {other!r}" if fits else problem)
    splits_columns = cfg.has_latent_moe and parallel.tail in ("columns", "folded")
    if splits_columns and cfg.hidden_size % parallel.tp:
        problems.append(
            f"hidden_size does not divide over the mesh: got {cfg.hidden_size}; expected a "
            f"multiple of tp{parallel.tp}, or tail 'all_reduce'"
        )
    if cfg.has_latent_moe and not cfg.has_latent_norm and parallel.tail == "fused":
        problems.append(
            "tail is not for this model: got 'fused' and latent_moe_use_norm false; expected a "
            "norm of the latents, or another tail"
        )
    return problems


def _check_experts(cfg: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Why the experts do not divide over the mesh, whole or inside."""
    num_ranks, ranks = parallel.num_ranks, f"dp{parallel.dp} x tp{parallel.tp}"
    if parallel.experts == "ep":
        if cfg.num_experts % num_ranks:
            return (
                f"num_experts does not divide over the mesh: got {cfg.num_experts}; expected a "
                f"multiple of {ranks} = {num_ranks}"
            )
        return None
    width, group = cfg.moe_intermediate_size, MXFP4_GROUP * num_ranks
    if width % num_ranks:
        return (
            f"moe_intermediate_size does not divide over the mesh: got {width}; expected a "
            f"multiple of {ranks} = {num_ranks}"
        )
    if cfg.expert_format == "mxfp4" and width % group:
        return (
            f"moe_intermediate_size does not divide into MXFP4 groups on every rank: got {width}; "
            f"expected a multiple of {MXFP4_GROUP} x {ranks} = {group}"
        )
    return None


def _check_sharded_tokens(parallel: ParallelConfig, engine: EngineConfig) -> list[str]:
    """Every prefill step whose tokens cannot be sharded."""
    from k3jax.buckets import prefill_sizes

    return [
        f"tokens of a prefill step do not divide over the mesh: got {size}, with "
        f"max_prefill_tokens {engine.max_prefill_tokens}; expected a multiple of tp{parallel.tp}, "
        "or shard_tokens 'auto'"
        for size in prefill_sizes(engine)
        if size % parallel.tp
    ]


def _check_model(cfg: ModelConfig) -> list[str]:
    """Every problem of one model configuration."""
    problems = []
    listed = cfg.kda_layers + cfg.mla_layers
    if len(listed) != cfg.num_layers or set(listed) != set(range(len(listed))):
        problems.append(
            f"kda_layers and full_attn_layers do not partition the {cfg.num_layers} layers: got "
            "(0-based) "
            f"{list(cfg.kda_layers)} and {list(cfg.mla_layers)}"
        )
    positive = """
        vocab_size hidden_size num_layers intermediate_size max_position_tokens kda_num_heads
        kda_head_dim conv_width mla_num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim
        v_head_dim num_experts experts_per_token num_shared_experts moe_intermediate_size
        latent_size num_expert_groups topk_groups
    """.split()  # noqa: SIM905
    for name in positive:
        if getattr(cfg, name) < 1:
            problems.append(f"{name} is out of range: got {getattr(cfg, name)}; expected >= 1")
    for name in ("rms_norm_eps", "mla_lora_norm_eps", "routed_scaling_factor"):
        if not 0.0 < getattr(cfg, name) < math.inf:
            problems.append(f"{name} is out of range: got {getattr(cfg, name)}; expected > 0")
    for name in ("situ_beta", "situ_linear_beta"):
        value = getattr(cfg, name)
        if value is not None and not 0.0 < value < math.inf:
            problems.append(f"{name} is out of range: got {value}; expected > 0 or null")
    ids = (cfg.bos_token_id, *cfg.eos_token_ids, cfg.pad_token_id)
    wrong_ids = [i for i in ids if i is not None and not 0 <= i < cfg.vocab_size]
    if wrong_ids:
        problems.append(
            f"special token ids are outside the vocabulary: got {wrong_ids}; expected "
            f"0..{cfg.vocab_size - 1}"
        )
    if problems:
        return problems
    if cfg.conv_width < 2:
        problems.append(f"conv_width is out of range: got {cfg.conv_width}; expected >= 2")
    if not 0 <= cfg.num_dense_layers <= cfg.num_layers:
        problems.append(
            f"num_dense_layers is out of range: got {cfg.num_dense_layers}; expected "
            f"0..{cfg.num_layers}"
        )
    if cfg.gate_lower_bound is not None and not -5.0 <= cfg.gate_lower_bound < 0.0:
        problems.append(
            f"gate_lower_bound is out of range: got {cfg.gate_lower_bound}; expected -5 <= bound < "
            "0 or null"
        )
    if cfg.experts_per_token > cfg.num_experts:
        problems.append(
            f"num_experts_per_token is too large: got {cfg.experts_per_token}; expected <= "
            f"{cfg.num_experts}"
        )
    if cfg.num_experts % cfg.num_expert_groups or cfg.topk_groups > cfg.num_expert_groups:
        problems.append(
            f"expert groups do not fit: got num_expert_group {cfg.num_expert_groups}, topk_group "
            f"{cfg.topk_groups} with {cfg.num_experts} experts"
        )
    if cfg.expert_format == "mxfp4":
        for name in ("latent_size", "moe_intermediate_size"):
            if getattr(cfg, name) % 32:
                problems.append(
                    f"{name} does not divide into MXFP4 groups: got {getattr(cfg, name)}; expected "
                    "a multiple of 32"
                )
    if cfg.attn_res_block_layers is not None and cfg.attn_res_block_layers < 1:
        problems.append(
            f"attn_res_block_size is out of range: got {cfg.attn_res_block_layers}; expected >= 1"
        )
    return problems
