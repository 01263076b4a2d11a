"""Attention-residual mix between a residual add and an RMSNorm (k3-model.md 2.8)."""

from pallas_kernels.attn_res.api import attn_res_norm
from pallas_kernels.attn_res.xla import mix as attn_res_mix

__all__ = ["attn_res_mix", "attn_res_norm"]
