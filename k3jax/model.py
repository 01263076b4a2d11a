"""The Kimi K3 decoder: the file to read first (k3-model.md section 2.8).

`K3` declares the parameters and composes the layers. A call is pure: token ids and the page pool
in, final hidden states and the new pool out. It runs inside `shard_map`, on one rank's parameters
and pool.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16

from k3jax import kda, mla, moe
from k3jax.buckets import Kind
from k3jax.cache_spec import layer_groups
from k3jax.config import Dtype, ModelConfig
from k3jax.draft.config import TapMode
from k3jax.layers import Declared, linear_f32
from k3jax.params import describe
from k3jax.pool import PoolLayout
from k3jax.step_meta import StepMeta
from pallas_kernels.attn_res import attn_res_mix, attn_res_norm
from pallas_kernels.numerics import round_to
from sharding import collectives
from sharding.axes import ParallelConfig


class Forward(NamedTuple):
    """What a pass through all layers gives.

    Attributes:
      hidden: normed states for `K3.logits`, of all tokens or of this rank's.
      load: that the replica's tokens put on the experts of each rank.
      trials: of the KDA layers, in a step with drafts; the states of the pool are as before then.
      taps: outputs of the tapped layers side by side, as `hidden` is sharded.
    """

    hidden: Float[Array, "t H"]
    pool: UInt16[Array, "Z P W words"]
    load: Int32[Array, " R"]
    trials: list[kda.KdaTrial]
    taps: Float[Array, "t BH"]


class K3(nn.Module):
    """Kimi K3 or Kimi-Linear on one rank of a mesh."""

    cfg: ModelConfig
    parallel: ParallelConfig
    dtype: Dtype

    def setup(self) -> None:
        for part in describe(self.cfg):
            setattr(self, part, Declared(part, self.cfg, self.parallel, self.dtype))

    def declare(self) -> None:
        """Create every parameter and compute nothing: for `init` under `eval_shape`."""
        for part in describe(self.cfg):
            getattr(self, part)()

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        pool: UInt16[Array, "Z P W words"],
        meta: StepMeta,
        layout: PoolLayout,
        tap_layers: tuple[int, ...] = (),
        tap_mode: TapMode = "prefix",
    ) -> Forward:
        """Run all layers.

        Between attention and feed-forward networks everything works on single tokens. In a prefill
        step each rank does that for its own tokens only, see `shards_tokens`.

        Args:
          tokens: flat token ids of all rows.
          pool: this rank's pages; entries and states of the step's tokens are written, in a step
            with drafts the entries only.
          tap_layers, tap_mode: whose outputs are returned as well, and as what: the residual stream
            behind such a layer, or the mixture that the next layer makes of it.
        """
        cfg = self.cfg
        where = layer_positions(cfg)
        is_sharded = shards_tokens(self.parallel, meta.kind, tokens.shape[0])
        used = collectives.own_tokens(meta.used, self.parallel.tp) if is_sharded else meta.used
        load = jnp.zeros(self.parallel.num_ranks, jnp.int32)
        with jax.named_scope("embed"):
            embed = collectives.embed_own_tokens if is_sharded else collectives.embed
            prefix = embed(self.top()["embed"], tokens)
        # `out` is what the last sub-layer gave, not yet part of the prefix: the next norm adds it.
        out: Float[Array, "t H"] | None = None
        bank: list[Float[Array, "t H"]] = []
        trials: list[kda.KdaTrial] = []
        stream: list[Float[Array, "t H"]] = []  # what each layer finds
        for i in range(cfg.num_layers):
            with jax.named_scope(f"layer_{i}"):
                prefix, x = self._norm("attn_res", "input", i, bank, prefix, out)
                stream.append(self._tap(tap_mode, i, bank, prefix))
                with jax.named_scope("attention/gather"):
                    x_all = collectives.gather_tokens(x) if is_sharded else x
                out, pool, trial = self._attention(i, where[i], x_all, pool, meta, layout)
                trials += [] if trial is None else [trial]
                with jax.named_scope("attention/sum"):
                    total = collectives.scatter_partials if is_sharded else collectives.sum_partials
                    out = round_to(total(out), x.dtype)
                if cfg.attn_res_block_layers is not None and i % cfg.attn_res_block_layers == 0:
                    bank = [*bank, prefix]
                    prefix, out = out, None
                prefix, x = self._norm("mlp_res", "post_attention", i, bank, prefix, out)
                out, layer_load = self._ffn(i, x, used, is_sharded)
                load = load + layer_load
        if is_sharded:
            with jax.named_scope("load"):
                load = collectives.sum_partials(load)
        prefix, hidden = self._final_norm(bank, prefix, out)
        stream.append(self._tap(tap_mode, cfg.num_layers, bank, prefix))
        taps = [stream[i + 1] for i in tap_layers] or [hidden[:, :0]]
        return Forward(hidden, pool, load, trials, jnp.concatenate(taps, axis=1))

    def commit(
        self,
        trials: list[kda.KdaTrial],
        accepted: Int32[Array, " S"],
        pool: UInt16[Array, "Z P W words"],
        meta: StepMeta,
    ) -> UInt16[Array, "Z P W words"]:
        """Store the states after the tokens of each row that stay; see `kda.kda_commit`."""
        where = layer_positions(self.cfg)
        for layer, (i, trial) in enumerate(zip(self.cfg.kda_layers, trials, strict=True)):
            group, position = where[i]
            with jax.named_scope(f"layer_{i}"):
                pool = kda.kda_commit(
                    self.kda(), self.cfg, trial, accepted, pool, meta,
                    layer=layer, group=group, position=position,
                )  # fmt: skip
        return pool

    def logits(self, hidden: Float[Array, "S H"]) -> Float32[Array, "S V"]:
        """Vocabulary-parallel head on normed hidden states; equal on all ranks."""
        with jax.named_scope("head"):
            return collectives.gather_columns(linear_f32(hidden, self.top()["lm_head"]))

    def _attention(
        self,
        i: int,
        where: tuple[int, int],
        x: Float[Array, "T H"],
        pool: UInt16[Array, "Z P W words"],
        meta: StepMeta,
        layout: PoolLayout,
    ) -> tuple[Float[Array, "T H"], UInt16[Array, "Z P W words"], kda.KdaTrial | None]:
        """KDA or MLA of layer `i`; its group and layer position are `where`."""
        cfg, (group, position) = self.cfg, where
        if i in cfg.kda_layers:
            return kda.kda_attention(
                self.kda(), cfg, x, pool, meta, layout,
                layer=cfg.kda_layers.index(i), group=group, position=position,
            )  # fmt: skip
        out, pool = mla.mla_attention(
            self.mla(), cfg, x, pool, meta, layer=cfg.mla_layers.index(i), position=position
        )
        return out, pool, None

    def _ffn(
        self, i: int, x: Float[Array, "t H"], used: Bool[Array, " t"], is_sharded: bool
    ) -> tuple[Float[Array, "t H"], Int32[Array, " R"]]:
        """The feed-forward network of layer `i`, and its load on the experts of each rank."""
        layer = i - self.cfg.num_dense_layers
        if layer < 0:
            out = moe.dense_ffn(self.dense(), self.cfg, x, layer=i, is_sharded=is_sharded)
            return out, jnp.zeros(self.parallel.num_ranks, jnp.int32)
        return moe.latent_moe(
            self.moe(), self.cfg, self.parallel, x, used, layer=layer, is_sharded=is_sharded
        )

    def _norm(
        self,
        mix: str,
        norm: str,
        i: int,
        bank: list[Float[Array, "t H"]],
        prefix: Float[Array, "t H"],
        out: Float[Array, "t H"] | None,
    ) -> tuple[Float[Array, "t H"], Float[Array, "t H"]]:
        """Add `out` to the prefix; mix and norm the input of the next sub-layer of layer `i`."""
        norms = self.norms()
        weights = (norms[f"{mix}_norm"][i], norms[f"{mix}_proj"][i]) if bank else None
        with jax.named_scope("attn_res"):
            eps = self.cfg.rms_norm_eps
            return attn_res_norm(bank, prefix, out, weights, norms[norm][i], eps=eps)

    def _tap(
        self, mode: TapMode, i: int, bank: list[Float[Array, "t H"]], prefix: Float[Array, "t H"]
    ) -> Float[Array, "t H"]:
        """What layer `i`, or the head, finds in the residual stream (k3-model.md section 6.4)."""
        if mode == "prefix" or not bank:
            return prefix
        if i == self.cfg.num_layers:
            norm, proj = self.top()["output_res_norm"], self.top()["output_res_proj"]
        else:
            norm, proj = (self.norms()[f"attn_res_{name}"][i] for name in ("norm", "proj"))
        mixed = attn_res_mix((*bank, prefix), norm, proj, eps=self.cfg.rms_norm_eps)
        return round_to(mixed, prefix.dtype)

    def _final_norm(
        self,
        bank: list[Float[Array, "t H"]],
        prefix: Float[Array, "t H"],
        out: Float[Array, "t H"] | None,
    ) -> tuple[Float[Array, "t H"], Float[Array, "t H"]]:
        """Add `out` to the prefix; mix and norm what the head reads."""
        top = self.top()
        weights = (top["output_res_norm"], top["output_res_proj"]) if bank else None
        with jax.named_scope("attn_res"):
            eps = self.cfg.rms_norm_eps
            return attn_res_norm(bank, prefix, out, weights, top["norm"], eps=eps)


def shards_tokens(parallel: ParallelConfig, kind: Kind, num_tokens: int) -> bool:
    """Whether a step's residual stream is sharded by tokens over `tp`.

    It is so in prefill, where replicated norms, attention residuals, routers and latent projections
    would cost more than the exchange (kernels.md section 0.6), as far as the tokens divide.

    Raises:
      ValueError: they do not, and `shard_tokens` is `on`.
    """
    if kind != "prefill" or parallel.tp == 1 or parallel.shard_tokens == "off":
        return False
    divides = num_tokens % parallel.tp == 0
    if parallel.shard_tokens == "on" and not divides:
        raise ValueError(
            f"tokens of a prefill step do not divide over the mesh: got {num_tokens}; expected a "
            f"multiple of tp{parallel.tp}, or shard_tokens 'auto'"
        )
    return divides


def layer_positions(cfg: ModelConfig) -> dict[int, tuple[int, int]]:
    """Layer -> (index among its kind's groups, layer position of the pool)."""
    where, counts = {}, {"attention": 0, "recurrent": 0}
    for group in layer_groups(cfg):
        for position, layer in enumerate(group.layers):
            where[layer] = (counts[group.kind], position)
        counts[group.kind] += 1
    return where


def abstract_params(cfg: ModelConfig, parallel: ParallelConfig, dtype: Dtype) -> dict:
    """Shapes of one rank's parameters (of the whole model on a mesh of one)."""
    model = K3(cfg, parallel, dtype)
    variables = jax.eval_shape(lambda key: model.init(key, method="declare"), jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables["params"])
