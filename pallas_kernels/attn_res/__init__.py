"""Attention-residual mix (k3-model.md 2.8)."""

from pallas_kernels.attn_res.api import attn_res_mix

__all__ = ["attn_res_mix"]
