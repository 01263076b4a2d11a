"""Sigmoid top-k router with a selection-only bias (k3-model.md 2.5)."""

from pallas_kernels.router.api import route

__all__ = ["route"]
