"""What changed in the replicas' caches: the part of the events that the engine's thread does.

A page table notes which entries came and went since its last commit. `news_of` takes what is new of
that between two states, and keeps hold of the tokens behind it. It looks at changes only, and at no
token; both states are immutable, so everything else can be done later and elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from serving.page_table import KeyChain, PageTable, Touch, extend_chain
from serving.plan import Output
from serving.replicas import Replicas
from serving.scheduler import SchedulerState
from serving.scheduler.token_log import TokenLog


class Source(NamedTuple):
    """The tokens of a request that published something.

    Attributes:
      chain: prefix keys of the prompt and of `output`, as far as they were made.
      output: generated tokens before the change.
      last_tokens: those of the step that ended the request.
    """

    chain: KeyChain
    prompt: tuple[int, ...]
    output: TokenLog
    last_tokens: tuple[int, ...] = ()

    def keys(self, count: int) -> tuple[bytes, ...]:
        """The first `count` keys."""
        chain = self.chain
        if len(chain.keys) < count:
            total = len(self.prompt) + self.output.num_tokens + len(self.last_tokens)
            chain = extend_chain(chain, self.tokens(chain.num_tokens, total))
        return chain.keys[:count]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens of positions `start` to `end`."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        generated = (*self.output.tokens(), *self.last_tokens)
        return self.prompt[start:] + generated[max(0, start - split) : end - split]


class News(NamedTuple):
    """Changes of one replica's cache.

    Attributes:
      table: after them.
      touched: entries that came or went, in order; may be empty if only a step was committed.
      sources: of the requests that published states, or pages where there are no states. Requests
        with a salt are left out: no client can ask for their prefixes.
    """

    table: PageTable
    touched: tuple[Touch, ...]
    sources: Mapping[str, Source]


OnNews = Callable[[Sequence[tuple[int, News]]], None]


class Watch:
    """Looks at every change of the replicas, and passes on what is news of their caches.

    Args:
      on_news: given the news of each replica that has some, with its number.
    """

    def __init__(self, num_replicas: int, on_news: OnNews):
        self._on_news = on_news
        # Last step whose commit makes something visible, of each replica.
        self._last_steps = [-1] * num_replicas

    def look(
        self, before: Replicas, after: Replicas, outputs: Sequence[Sequence[Output]] = ()
    ) -> None:
        """Take note of one change.

        Args:
          outputs: of each replica, if the change was a commit.
        """
        found: list[tuple[int, News]] = []
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if new.table is old.table:
                continue
            is_commit = new.table.committed != old.table.committed
            touched = new.table.touched[0 if is_commit else len(old.table.touched) :]
            if touched:
                last_step = max(touch.step for touch in touched)
                self._last_steps[number] = max(self._last_steps[number], last_step)
            elif not is_commit or self._last_steps[number] <= old.table.committed:
                continue
            found.append((number, news_of(old, new, touched, outputs[number] if outputs else ())))
        if found:
            self._on_news(found)


def news_of(
    before: SchedulerState,
    after: SchedulerState,
    touched: tuple[Touch, ...],
    outputs: Sequence[Output],
) -> News:
    """The news of a change.

    Args:
      touched: by this change.
      outputs: of the step, if the change was a commit.
    """
    has_states = after.table.geometry.num_state_pages > 0
    owners = {
        touch.owner
        for touch in touched
        if touch.owner is not None and (touch.is_state or not has_states)
    }
    sources: dict[str, Source] = {}
    for owner in owners:
        row = after.running.get(owner)
        last_tokens: tuple[int, ...] = ()
        if row is None:
            row = before.running[owner]
            ended = (output.token_ids for output in outputs if output.request_id == owner)
            last_tokens = tuple(itertools.chain.from_iterable(ended))
        if not row.request.cache_salt:
            sources[owner] = Source(row.chain, row.request.prompt, row.output, last_tokens)
    return News(after.table, touched, sources)
