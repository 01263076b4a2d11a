"""The Kimi K3 decoder: the file to read first (k3-model.md section 2.8).

`K3` declares the parameters and composes the layers. A call is pure: token ids and the page pool
in, final hidden states and the new pool out. It runs inside `shard_map`, on one rank's parameters
and pool.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16

from k3jax import kda, mla, moe
from k3jax.buckets import Kind
from k3jax.cache_spec import layer_groups
from k3jax.config import Dtype, ModelConfig
from k3jax.layers import Declared, add, linear_f32, rms_norm
from k3jax.params import describe
from k3jax.pool import PoolLayout
from k3jax.step_meta import StepMeta
from pallas_kernels.attn_res import attn_res_mix
from pallas_kernels.numerics import round_to
from sharding import collectives
from sharding.axes import ParallelConfig


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
    ) -> tuple[Float[Array, "t H"], UInt16[Array, "Z P W words"], Int32[Array, " R"]]:
        """Run all layers.

        Between attention and feed-forward networks everything works on single tokens. In a prefill
        step each rank does that for its own tokens only, see `shards_tokens`.

        Args:
          tokens: flat token ids of all rows.
          pool: this rank's pages; entries and states of the step's tokens are written.

        Returns:
          Hidden states before the final norm, of all tokens or of this rank's; the pool; and the
          load that the replica's tokens put on the experts of each rank.
        """
        cfg = self.cfg
        where = layer_positions(cfg)
        is_sharded = shards_tokens(self.parallel, meta.kind, tokens.shape[0])
        used = collectives.own_tokens(meta.used, self.parallel.tp) if is_sharded else meta.used
        load = jnp.zeros(self.parallel.num_ranks, jnp.int32)
        with jax.named_scope("embed"):
            embed = collectives.embed_own_tokens if is_sharded else collectives.embed
            prefix = embed(self.top()["embed"], tokens)
        bank: list[Float[Array, "t H"]] = []
        for i in range(cfg.num_layers):
            with jax.named_scope(f"layer_{i}"):
                h = self._mix("attn_res", i, bank, prefix)
                starts_block = (
                    cfg.attn_res_block_layers is not None and i % cfg.attn_res_block_layers == 0
                )
                if starts_block:
                    bank = [*bank, prefix]
                x = rms_norm(h, self.norms()["input"][i], cfg.rms_norm_eps)
                with jax.named_scope("attention/gather"):
                    x_all = collectives.gather_tokens(x) if is_sharded else x
                out, pool = self._attention(i, where[i], x_all, pool, meta, layout)
                with jax.named_scope("attention/sum"):
                    total = collectives.scatter_partials if is_sharded else collectives.sum_partials
                    out = round_to(total(out), x.dtype)
                prefix = out if starts_block else add(prefix, out)
                h = self._mix("mlp_res", i, bank, prefix)
                x = rms_norm(h, self.norms()["post_attention"][i], cfg.rms_norm_eps)
                out, layer_load = self._ffn(i, x, used, is_sharded)
                prefix, load = add(prefix, out), load + layer_load
        if is_sharded:
            with jax.named_scope("load"):
                load = collectives.sum_partials(load)
        return self._output_mix(bank, prefix), pool, load

    def logits(self, hidden: Float[Array, "S H"]) -> Float32[Array, "S V"]:
        """Final norm and vocabulary-parallel head; equal on all ranks."""
        with jax.named_scope("head"):
            x = rms_norm(hidden, self.top()["norm"], self.cfg.rms_norm_eps)
            return collectives.gather_columns(linear_f32(x, self.top()["lm_head"]))

    def _attention(
        self,
        i: int,
        where: tuple[int, int],
        x: Float[Array, "T H"],
        pool: UInt16[Array, "Z P W words"],
        meta: StepMeta,
        layout: PoolLayout,
    ) -> tuple[Float[Array, "T H"], UInt16[Array, "Z P W words"]]:
        """KDA or MLA of layer `i`; its group and layer position are `where`."""
        cfg, (group, position) = self.cfg, where
        if i in cfg.kda_layers:
            return kda.kda_attention(
                self.kda(), cfg, x, pool, meta, layout,
                layer=cfg.kda_layers.index(i), group=group, position=position,
            )  # fmt: skip
        return mla.mla_attention(
            self.mla(), cfg, x, pool, meta, layer=cfg.mla_layers.index(i), position=position
        )

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

    def _mix(
        self, name: str, i: int, bank: list[Float[Array, "t H"]], prefix: Float[Array, "t H"]
    ) -> Float[Array, "t H"]:
        """Attention residual of layer `i` over the bank and the running prefix."""
        if not bank:
            return prefix
        norms = self.norms()
        return self._attn_res(bank, prefix, norms[f"{name}_norm"][i], norms[f"{name}_proj"][i])

    def _output_mix(
        self, bank: list[Float[Array, "t H"]], prefix: Float[Array, "t H"]
    ) -> Float[Array, "t H"]:
        if not bank:
            return prefix
        top = self.top()
        return self._attn_res(bank, prefix, top["output_res_norm"], top["output_res_proj"])

    def _attn_res(
        self,
        bank: list[Float[Array, "t H"]],
        prefix: Float[Array, "t H"],
        norm: Float[Array, " H"],
        proj: Float[Array, " H"],
    ) -> Float[Array, "t H"]:
        with jax.named_scope("attn_res"):
            return attn_res_mix((*bank, prefix), norm, proj, eps=self.cfg.rms_norm_eps)


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
