"""All cases of the benchmark: one module an operator."""

from __future__ import annotations

from kernel_bench import attn_res, kda, kda_prefill, mla, mla_prefill, moe, router
from kernel_bench.case import Case

MODULES = (moe, kda, kda_prefill, mla, mla_prefill, attn_res, router)


def all_cases() -> list[Case]:
    """Every case, in the order of the table."""
    return [case for module in MODULES for case in module.cases()]
