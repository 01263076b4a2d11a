"""Kimi Delta Attention: decay gate, chunked prefill and one-token decode (k3-model.md 2.3)."""

from pallas_kernels.kda.api import kda_decode, kda_prefill
from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.kda.paged import kda_decode_paged
from pallas_kernels.kda.pages import read_states, write_states

__all__ = [
    "kda_decode",
    "kda_decode_paged",
    "kda_gate",
    "kda_prefill",
    "read_states",
    "write_states",
]
