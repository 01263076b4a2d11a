"""What follows the experts of a latent MoE, over the ranks of a mesh axis (k3-model.md 5.4)."""

from pallas_kernels.moe_tail.api import moe_tail

__all__ = ["moe_tail"]
