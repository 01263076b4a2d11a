"""The page table: page size, which request owns which page, and what can be reused."""

from serving.page_table.alignment import (
    Capacity,
    LcmPage,
    PageGeometry,
    align,
    capacity,
    lcm_page,
    pages_in,
    report,
)
from serving.page_table.effects import Chunk, Clear, Copy, Effect
from serving.page_table.invariants import check
from serving.page_table.keys import KeyChain, chain_of, extend_chain, unit_keys
from serving.page_table.lifecycle import (
    InUse,
    admit,
    commit_step,
    evict,
    extend,
    publish,
    release,
    reset,
    settle,
    shed,
)
from serving.page_table.policy import (
    CachePolicy,
    boundary_below,
    export_position,
)
from serving.page_table.prefix import MISS, Hit, Probe, lookup, probe
from serving.page_table.publishing import next_key
from serving.page_table.states import Move
from serving.page_table.table import (
    NULL_PAGE,
    Allocation,
    OutOfPages,
    PageTable,
    Touch,
    empty_table,
    entries,
    held,
)
from serving.page_table.tickets import Ticket
from serving.page_table.transfer import (
    NotReceivable,
    accept,
    advertise,
    expire,
    fail_transfer,
    receive,
)

__all__ = [
    "MISS",
    "NULL_PAGE",
    "Allocation",
    "CachePolicy",
    "Capacity",
    "Chunk",
    "Clear",
    "Copy",
    "Effect",
    "Hit",
    "InUse",
    "KeyChain",
    "LcmPage",
    "Move",
    "NotReceivable",
    "OutOfPages",
    "PageGeometry",
    "PageTable",
    "Probe",
    "Ticket",
    "Touch",
    "accept",
    "admit",
    "advertise",
    "align",
    "boundary_below",
    "capacity",
    "chain_of",
    "check",
    "commit_step",
    "empty_table",
    "entries",
    "evict",
    "expire",
    "export_position",
    "extend",
    "extend_chain",
    "fail_transfer",
    "held",
    "lcm_page",
    "lookup",
    "next_key",
    "pages_in",
    "probe",
    "publish",
    "receive",
    "release",
    "report",
    "reset",
    "settle",
    "shed",
    "unit_keys",
]
