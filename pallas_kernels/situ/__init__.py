"""Gated activations: SiTU-GLU (k3-model.md 2.6) and SwiGLU."""

from pallas_kernels.situ.api import situ_glu, swiglu

__all__ = ["situ_glu", "swiglu"]
