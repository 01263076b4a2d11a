"""Absorbed MLA attention over the page pool, without positional encoding (k3-model.md 2.4)."""

from pallas_kernels.mla.api import mla_decode, mla_prefill, mla_write

__all__ = ["mla_decode", "mla_prefill", "mla_write"]
