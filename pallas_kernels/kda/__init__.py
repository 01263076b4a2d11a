"""Kimi Delta Attention: decay gate, chunked prefill, decode and verification (k3-model.md 2.3)."""

from pallas_kernels.kda.api import kda_decode, kda_prefill
from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.kda.paged import kda_decode_paged
from pallas_kernels.kda.pages import read_states, write_states
from pallas_kernels.kda.records import KdaRecords
from pallas_kernels.kda.verify import kda_commit_paged, kda_verify_paged

__all__ = [
    "KdaRecords",
    "kda_commit_paged",
    "kda_decode",
    "kda_decode_paged",
    "kda_gate",
    "kda_prefill",
    "kda_verify_paged",
    "read_states",
    "write_states",
]
