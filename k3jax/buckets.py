"""Padded shapes of the compiled step programs. Host values only.

Every step runs in the smallest bucket that holds it. All buckets are compiled before the server is
ready, so the table is short: sizes grow by factors of four and eight.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.config import ConfigError, EngineConfig

Kind = Literal["prefill", "decode"]

# Below these, a smaller bucket would save less than its compilation costs.
_SHORT_CONTEXT_TOKENS = 16384
_SHORT_PREFILL_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Shape of one step program.

    Attributes:
      kind: `prefill` takes rows of any length; `decode` the newest token of each row, with up to
        `num_drafts` drafts of the tokens behind it.
      tokens: `T`, flat tokens of all rows.
      rows: `S`.
      pages: `M`, attention pages per row.
    """

    kind: Kind
    tokens: int
    rows: int
    pages: int

    @property
    def num_drafts(self) -> int:
        """Drafts that each row of a decode step can bring."""
        return self.tokens // self.rows - 1 if self.kind == "decode" else 0


def bucket_table(engine: EngineConfig, *, page_tokens: int) -> tuple[Bucket, ...]:
    """All buckets of a server, in ascending order.

    With drafts, every decode step has room for them.
    """
    most_pages = -(-engine.max_context_tokens // page_tokens)
    few_pages = -(-_SHORT_CONTEXT_TOKENS // page_tokens)
    widths = _sizes(min(few_pages, most_pages), most_pages, factor=4)
    row_counts = _sizes(1, engine.max_rows, factor=8)
    slots = 1 + engine.num_drafts
    decode = [
        Bucket("decode", rows * slots, rows, pages) for rows in row_counts for pages in widths
    ]
    prefill = [
        Bucket("prefill", tokens, engine.max_prefill_rows, pages)
        for tokens in prefill_sizes(engine)
        for pages in widths
    ]
    return tuple(sorted(decode + prefill))


def prefill_sizes(engine: EngineConfig) -> tuple[int, ...]:
    """Flat tokens of the prefill steps, ascending."""
    largest = engine.max_prefill_tokens
    return _sizes(min(_SHORT_PREFILL_TOKENS, largest), largest, factor=4)


def choose(table: tuple[Bucket, ...], kind: Kind, *, tokens: int, rows: int, pages: int) -> Bucket:
    """The smallest bucket of `kind` that holds the step.

    Raises:
      ConfigError: no bucket is large enough.
    """
    fitting = [
        bucket
        for bucket in table
        if bucket.kind == kind
        and bucket.tokens >= tokens
        and bucket.rows >= rows
        and bucket.pages >= pages
    ]
    if not fitting:
        raise ConfigError(
            f"no {kind} bucket is large enough: got {tokens} tokens, {rows} rows, {pages} pages; "
            "expected at most "
            f"{max((b for b in table if b.kind == kind), default=None)}"
        )
    return min(fitting, key=lambda b: (b.tokens, b.rows, b.pages))


def _sizes(smallest: int, largest: int, *, factor: int) -> tuple[int, ...]:
    """`largest`, `largest / factor`, ... and `smallest`, ascending."""
    sizes = {smallest, largest}
    size = largest
    while size > smallest:
        sizes.add(size)
        size //= factor
    return tuple(sorted(sizes))
