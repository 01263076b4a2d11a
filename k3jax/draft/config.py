"""Configuration of a DSpark draft model (k3-model.md section 6). Never imports jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from k3jax.config import MAX_DRAFTS, ConfigError, ModelConfig

TapMode = Literal["prefix", "mixture"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Stretching of rotary positions beyond those of the training.

    Attributes:
      original_tokens: context that the frequencies were made for.
      beta_fast, beta_slow: turns over that context from which a frequency is kept, and up to which
        it is divided by `factor`.
    """

    factor: float
    original_tokens: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions.

    Attributes:
      dim: rotated numbers of a head.
      is_interleaved: pairs are neighbours (2i, 2i + 1), else (i, i + dim / 2).
    """

    dim: int
    theta: float
    is_interleaved: bool
    yarn: Yarn | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Latent attention, as in the target model but with rotary positions."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def entry_width(self) -> int:
        """Numbers cached for each token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GqaShape:
    """Grouped-query attention with normed queries and keys."""

    num_kv_heads: int
    head_dim: int

    @property
    def entry_width(self) -> int:
        """Numbers cached for each token and layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A draft model: a few dense layers that propose a block of tokens at once.

    Attributes:
      softmax_scale: multiplies the scores.
      tap_layers: 0-based target layers whose outputs make the context, ascending.
      tap_mode: what is taken after such a layer: the running `prefix`, or the `mixture` of the
        attention residual that the next layer reads.
      num_drafts: proposed tokens of a block.
      mask_token_id: input in place of the tokens to be proposed.
      is_causal: whether a row of a block sees only those before it.
      window: context tokens in front of the anchor that a block sees; None is all.
      has_own_vocab: embedding and head are its own, else the target's.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    attention: MlaShape | GqaShape
    softmax_scale: float
    rms_norm_eps: float
    rope: Rope
    target_hidden_size: int
    tap_layers: tuple[int, ...]
    tap_mode: TapMode
    num_drafts: int
    mask_token_id: int
    is_causal: bool
    window: int | None
    markov_rank: int
    has_confidence: bool
    has_own_vocab: bool

    def __post_init__(self) -> None:
        problems = [
            f"{name} is out of range: got {value}; expected at least 1"
            for name, value in dataclasses.asdict(self).items()
            if isinstance(value, int) and not isinstance(value, bool) and value < 1
        ]
        if list(self.tap_layers) != sorted(set(self.tap_layers)) or not self.tap_layers:
            problems.append(
                f"tapped layers are wrong: got {list(self.tap_layers)}; expected different layers "
                "in ascending order"
            )
        if self.num_drafts > MAX_DRAFTS:
            problems.append(
                f"drafts of a block are too many: got {self.num_drafts}; expected at most "
                f"{MAX_DRAFTS}"
            )
        if self.mask_token_id >= self.vocab_size:
            problems.append(
                f"mask_token_id is outside the vocabulary: got {self.mask_token_id}; expected "
                f"below {self.vocab_size}"
            )
        if self.rope.dim % 2:
            problems.append(f"rotated numbers are odd: got {self.rope.dim}; expected pairs")
        if isinstance(self.attention, GqaShape) and self.num_heads % self.attention.num_kv_heads:
            problems.append(
                f"query heads do not divide: got {self.num_heads}; expected a multiple of the "
                f"{self.attention.num_kv_heads} key heads"
            )
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Read the `config.json` of a released draft.

        Raises:
          ConfigError: a key is missing, unknown, or has a value that is not implemented.
        """
        from k3jax.draft import hf_config

        return cls(**hf_config.parse(config))

    def entry_width(self, tp: int) -> int:
        """Numbers that one rank caches for a token and layer: GQA heads are split over `tp`."""
        split = tp if isinstance(self.attention, GqaShape) else 1
        return self.attention.entry_width // split

    def check_target(self, target: ModelConfig) -> None:
        """Check that this draft belongs to a target model.

        Raises:
          ConfigError: it does not; all differences are listed.
        """
        problems = [
            f"{name} of the draft is wrong: got {got}; expected {expected} as in the target"
            for name, got, expected in (
                ("target_hidden_size", self.target_hidden_size, target.hidden_size),
                ("vocab_size", self.vocab_size, target.vocab_size),
                *(() if self.has_own_vocab
                  else (("hidden_size", self.hidden_size, target.hidden_size),)),
            )
            if got != expected
        ]  # fmt: skip
        if self.tap_layers[-1] >= target.num_layers:
            problems.append(
                f"tapped layers are out of range: got {list(self.tap_layers)}; expected layers "
                f"below {target.num_layers}"
            )
        if self.tap_mode == "mixture" and target.attn_res_block_layers is None:
            problems.append(
                "tap mode is wrong: got 'mixture'; expected 'prefix', as the target has no "
                "attention residuals"
            )
        if problems:
            raise ConfigError(problems)


def positions_per_entry(width: int, target_width: int) -> int:
    """Layer positions of the pool that a draft's entry takes."""
    return -(-width // target_width)


def mla_softmax_scale(shape: MlaShape, yarn_factor: float, mscale_all_dim: float) -> float:
    """Scale of the scores, with the correction that belongs to YaRN."""
    correction = 0.1 * mscale_all_dim * math.log(yarn_factor) + 1 if yarn_factor > 1 else 1.0
    return (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5 * correction**2
