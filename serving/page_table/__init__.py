"""The page table: page size, and which request owns which page."""

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
from serving.page_table.table import (
    NULL_PAGE,
    Allocation,
    Clear,
    Effect,
    OutOfPages,
    PageTable,
    admit,
    check,
    empty_table,
    extend,
    release,
)

__all__ = [
    "NULL_PAGE",
    "Allocation",
    "Capacity",
    "Clear",
    "Effect",
    "LcmPage",
    "OutOfPages",
    "PageGeometry",
    "PageTable",
    "admit",
    "align",
    "capacity",
    "check",
    "empty_table",
    "extend",
    "lcm_page",
    "pages_in",
    "release",
    "report",
]
