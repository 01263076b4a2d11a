"""What can be wrong with the bytes of a step."""

from __future__ import annotations

from typing import Literal, NamedTuple

Rule = Literal[
    "prefix",  # an attention slot below a row's first new token is not its own prefix
    "foreign",  # an attention page that a row may read holds bytes of a state
    "state",  # a row starts from another state than that of exactly its prefix
    "published",  # bytes of a reusable entry change
    "shared",  # bytes that another request still needs change
    "race",  # a row's start state lies in a page that the same step writes
    "copies",  # copies that depend on each other
    "null",  # the null page is used
    "tokens",  # a row brings other tokens than its request has
    "plan",  # a row's fields contradict each other
    "entry",  # a reusable entry names a page with other bytes
    "hit",  # a request reuses no whole number of units, or all of its tokens
    "output",  # a request gets other tokens than the device emitted
]


class Violation(NamedTuple):
    """A page that does not hold what it must. `request_id` is empty if none is concerned."""

    step_id: int
    rule: Rule
    request_id: str
    detail: str

    def __str__(self) -> str:
        who = f" of {self.request_id!r}" if self.request_id else ""
        return f"step {self.step_id}, {self.rule}{who}: {self.detail}"
