"""The Kimi K3 decoder: the file to read first (k3-model.md section 2.8).

`K3` declares the parameters and composes the layers. A call is pure: token ids and the page pool
in, final hidden states and the new pool out. It runs inside `shard_map`, on one rank's parameters
and pool.
"""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Float32, Int32, UInt16

from k3jax import kda, mla, moe
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
    ) -> tuple[Float[Array, "T H"], UInt16[Array, "Z P W words"]]:
        """Run all layers.

        Args:
          tokens: flat token ids of all rows.
          pool: this rank's pages; entries and states of the step's tokens are written.

        Returns:
          Hidden states before the final norm, and the pool.
        """
        cfg = self.cfg
        where = layer_positions(cfg)
        with jax.named_scope("embed"):
            prefix = collectives.embed(self.top()["embed"], tokens)
        bank: list[Float[Array, "T H"]] = []
        for i in range(cfg.num_layers):
            with jax.named_scope(f"layer_{i}"):
                h = self._mix("attn_res", i, bank, prefix)
                starts_block = (
                    cfg.attn_res_block_layers is not None and i % cfg.attn_res_block_layers == 0
                )
                if starts_block:
                    bank = [*bank, prefix]
                x = rms_norm(h, self.norms()["input"][i], cfg.rms_norm_eps)
                out, pool = self._attention(i, where[i], x, pool, meta, layout)
                out = round_to(collectives.sum_partials(out), x.dtype)
                prefix = out if starts_block else add(prefix, out)
                h = self._mix("mlp_res", i, bank, prefix)
                x = rms_norm(h, self.norms()["post_attention"][i], cfg.rms_norm_eps)
                prefix = add(prefix, self._ffn(i, x, meta))
        return self._output_mix(bank, prefix), pool

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

    def _ffn(self, i: int, x: Float[Array, "T H"], meta: StepMeta) -> Float[Array, "T H"]:
        if i < self.cfg.num_dense_layers:
            return moe.dense_ffn(self.dense(), self.cfg, x, layer=i)
        layer = i - self.cfg.num_dense_layers
        return moe.latent_moe(self.moe(), self.cfg, self.parallel, x, meta.used, layer=layer)

    def _mix(
        self, name: str, i: int, bank: list[Float[Array, "T H"]], prefix: Float[Array, "T H"]
    ) -> Float[Array, "T H"]:
        """Attention residual of layer `i` over the bank and the running prefix."""
        if not bank:
            return prefix
        norms = self.norms()
        return self._attn_res(bank, prefix, norms[f"{name}_norm"][i], norms[f"{name}_proj"][i])

    def _output_mix(
        self, bank: list[Float[Array, "T H"]], prefix: Float[Array, "T H"]
    ) -> Float[Array, "T H"]:
        if not bank:
            return prefix
        top = self.top()
        return self._attn_res(bank, prefix, top["output_res_norm"], top["output_res_proj"])

    def _attn_res(
        self,
        bank: list[Float[Array, "T H"]],
        prefix: Float[Array, "T H"],
        norm: Float[Array, " H"],
        proj: Float[Array, " H"],
    ) -> Float[Array, "T H"]:
        with jax.named_scope("attn_res"):
            return attn_res_mix((*bank, prefix), norm, proj, eps=self.cfg.rms_norm_eps)


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
