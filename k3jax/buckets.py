"""Padded shapes of the compiled step programs. Host values only.

Every step runs in the smallest bucket that holds it. All buckets are compiled before the server is ready, so the
table is short: each size grows by a factor of four.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.config import ConfigError, EngineConfig

Kind = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Shape of one step program.

    Attributes:
      kind: `prefill` takes rows of any length, `decode` exactly one token a row.
      tokens: `T`, flat tokens of all rows.
      rows: `S`.
      pages: `M`, attention pages per row.
    """

    kind: Kind
    tokens: int
    rows: int
    pages: int


def bucket_table(engine: EngineConfig, *, page_tokens: int) -> tuple[Bucket, ...]:
    """All buckets of a server, in ascending order."""
    pages = _sizes(1, -(-engine.max_context_tokens // page_tokens))
    decode = [
        Bucket("decode", rows, rows, width)
        for rows in _sizes(1, engine.max_rows)
        for width in pages
    ]
    prefill = [
        Bucket("prefill", tokens, engine.max_prefill_rows, width)
        for tokens in _sizes(min(64, engine.max_prefill_tokens), engine.max_prefill_tokens)
        for width in pages
    ]
    return tuple(sorted(decode + prefill))


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
            f"no {kind} bucket is large enough: got {tokens} tokens, {rows} rows, {pages} pages; expected at most "
            f"{max((b for b in table if b.kind == kind), default=None)}"
        )
    return min(fitting, key=lambda b: (b.tokens, b.rows, b.pages))


def _sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """`largest`, `largest / 4`, ... down to `smallest`, ascending."""
    sizes = {smallest, largest}
    size = largest
    while size > smallest:
        sizes.add(size)
        size //= 4
    return tuple(sorted(sizes))
