"""Routed experts on dense or MXFP4-packed weights (k3-model.md 2.5)."""

from pallas_kernels.moe.api import moe_experts
from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize

__all__ = ["PackedWeight", "dequantize", "moe_experts"]
