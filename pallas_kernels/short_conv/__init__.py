"""Short causal depthwise convolution with SiLU (k3-model.md 2.2)."""

from pallas_kernels.short_conv.api import short_conv, short_conv_step

__all__ = ["short_conv", "short_conv_step"]
