"""Which prefixes a replica holds, as a router should see it, and the events of its changes.

A block is one hash unit. What may be said of it follows from where a hit can end
(cache-semantics.md section 4): at n tokens only if the recurrent state after exactly n tokens is
there, all pages before it can be found at their ends, and the MLA entries can be found at n. Such a
place is an *end*. MLA entries without an end at or after them serve no hit, so:

    A prefix is held if an end lies at it, or further on in the same text.

The blocks between two ends have to be told, because a router matches block by block from the start
of a prompt. So a prompt that leaves a told text between two ends reuses less than the router
counts, down to the last end before the fork. It is still sent to the right place: only there the
fork is noticed, and the state kept at it serves the next one. What no end follows, such as a page
whose state was evicted, is not told.

A step's entries count once it is committed. Without recurrent layers each page that can be reached
from the start is an end.
"""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import NamedTuple

from serving.kv_events.events import Block, Cleared, Event, Removed, Stored, block_hash
from serving.kv_events.news import News, Source
from serving.page_table import PageTable, Touch
from serving.request import InvariantError


class _Node:
    """A prefix that leads to a state.

    Attributes:
      units: its length.
      has_state: whether the state after it is visible.
      is_attended: whether its MLA entries can be found at its end.
      is_open: whether every whole page before it can be found.
      is_end: all three.
      num_uses: 1 if it is an end, and its held children: it is held if it is not 0.
    """

    __slots__ = (
        "block", "children", "has_state", "is_attended", "is_end", "is_open", "key", "num_uses",
        "parent", "units",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: _Node | None, token_ids: array.array[int]):
        self.key, self.parent = key, parent
        self.units: int = 0 if parent is None else parent.units + 1
        self.block = Block(block_hash(key), token_ids)
        self.children: dict[bytes, _Node] = {}
        self.has_state = self.is_attended = self.is_end = False
        self.is_open = parent is None
        self.num_uses = 0


class _Pending(NamedTuple):
    """An entry whose step is not committed."""

    touch: Touch
    source: Source | None


class HeldPrefixes:
    """The prefixes that one replica holds. `update` follows the replica's news, without a gap.

    Args:
      table: of the replica, without entries.
    """

    def __init__(self, table: PageTable):
        self._unit = table.policy.unit_tokens
        self._page_units = table.geometry.page_tokens // self._unit
        self._has_states = table.geometry.num_state_pages > 0
        self._root = _Node(b"", None, array.array("I"))
        self._root.is_attended = True
        self._nodes: dict[bytes, _Node] = {}
        self._pending: dict[tuple[bool, bytes], _Pending] = {}
        self._flips: dict[_Node, bool] = {}
        self.num_blocks = 0

    def update(self, news: News) -> tuple[Event, ...]:
        """Follow a change, and return what it means for a router."""
        looked_at = self._pending
        self._pending = {}
        for touch in news.touched:
            source = news.sources.get(touch.owner) if touch.owner is not None else None
            key = (touch.is_state, touch.key)
            earlier = looked_at.get(key)
            if source is None and earlier is not None:
                touch, source = earlier
            looked_at[key] = _Pending(touch, source)
        spoiled: list[_Node] = []
        for (is_state, key), pending in looked_at.items():
            is_visible, is_awaited = _find(news.table, key, is_state=is_state)
            if is_awaited:
                self._pending[is_state, key] = pending
            node = self._nodes.get(key)
            makes_nodes = is_state or not self._has_states
            if node is None and is_visible and makes_nodes and pending.source is not None:
                node = self._grow(news.table, pending.touch, pending.source)
            if node is None:
                continue
            if makes_nodes:
                node.has_state = is_visible
            if not is_state:
                self._attend(node, is_visible)
            self._judge(node)
            if not node.has_state:
                spoiled.append(node)
        events = self._events()
        for node in spoiled:
            self._prune(node)
        return events

    def blocks(self) -> Iterator[tuple[int | None, Block]]:
        """All held blocks with the hash of the one before, which comes earlier."""
        open_nodes = [self._root]
        while open_nodes:
            node = open_nodes.pop()
            if node is not self._root:
                yield self._parent_hash(node), node.block
            open_nodes += [child for child in node.children.values() if child.num_uses]

    def _grow(self, table: PageTable, touch: Touch, source: Source) -> _Node:
        """Add a prefix and all before it."""
        count = touch.tokens // self._unit
        keys = source.keys(count)
        if len(keys) < count or keys[-1] != touch.key:
            raise InvariantError(
                f"the key of {touch.owner!r} at {touch.tokens} tokens is not that of its tokens"
            )
        first = count
        while first and keys[first - 1] not in self._nodes:
            first -= 1
        node = self._nodes[keys[first - 1]] if first else self._root
        unit = self._unit
        token_ids = array.array("I", source.tokens(first * unit, count * unit))
        for index, key in enumerate(keys[first:]):
            child = _Node(key, node, token_ids[index * unit : (index + 1) * unit])
            child.is_attended = _find(table, key, is_state=False)[0]
            child.is_open = self._passes(node)
            node.children[key] = self._nodes[key] = child
            node = child
        return node

    def _passes(self, node: _Node) -> bool:
        """Whether every whole page up to and with a prefix can be found."""
        return node.is_open and (node.units % self._page_units > 0 or node.is_attended)

    def _attend(self, node: _Node, is_attended: bool) -> None:
        """Note whether MLA entries can be found at a prefix, and what that means beyond it."""
        before = self._passes(node)
        node.is_attended = is_attended
        changed = [node] if self._passes(node) != before else []
        while changed:
            parent = changed.pop()
            is_open = self._passes(parent)
            for child in parent.children.values():
                before = self._passes(child)
                child.is_open = is_open
                self._judge(child)
                if self._passes(child) != before:
                    changed.append(child)

    def _judge(self, node: _Node) -> None:
        """Find out whether a prefix is an end."""
        is_end = node.has_state and node.is_attended and node.is_open
        if is_end == node.is_end:
            return
        node.is_end = is_end
        change = 1 if is_end else -1
        while node.parent is not None:
            was_held = node.num_uses > 0
            node.num_uses += change
            if (node.num_uses > 0) == was_held:
                break
            self._flips.setdefault(node, was_held)
            node = node.parent

    def _prune(self, node: _Node) -> None:
        """Forget a prefix that leads to no state any more, and those before it."""
        while node.parent is not None and not node.children and not node.has_state:
            if self._nodes.pop(node.key, None) is None:
                return  # with another one
            del node.parent.children[node.key]
            node = node.parent

    def _events(self) -> tuple[Event, ...]:
        """What changed since the last call."""
        flips, self._flips = self._flips, {}
        lost = [node for node, was_held in flips.items() if was_held and not node.num_uses]
        new = [node for node, was_held in flips.items() if not was_held and node.num_uses]
        self.num_blocks += len(new) - len(lost)
        if lost and not self.num_blocks:
            return (Cleared(),)
        lost.sort(key=lambda node: -node.units)
        new.sort(key=lambda node: node.units)
        removed = (Removed(tuple(node.block.block_hash for node in lost)),) if lost else ()
        return (*removed, *runs((self._parent_hash(node), node.block) for node in new))

    def _parent_hash(self, node: _Node) -> int | None:
        parent = node.parent
        return None if parent is None or parent is self._root else parent.block.block_hash


def runs(blocks: Iterator[tuple[int | None, Block]]) -> Iterator[Stored]:
    """Join blocks, each after the one before it in its text, to runs, parents before children."""
    found: dict[int | None, tuple[int | None, list[Block]]] = {}
    finished: list[tuple[int | None, list[Block]]] = []
    for parent, block in blocks:
        run = found.pop(parent, None) if parent is not None else None
        if run is None:
            run = (parent, list[Block]())
            finished.append(run)
        run[1].append(block)
        found[block.block_hash] = run
    return (Stored(parent, tuple(run)) for parent, run in finished)


def _find(table: PageTable, key: bytes, *, is_state: bool) -> tuple[bool, bool]:
    """Whether a key has an entry that is visible, and whether it has one that is not yet."""
    found = (table.states if is_state else table.attention).get(key, ())
    num_visible = sum(entry.step <= table.committed for entry in found)
    return num_visible > 0, num_visible < len(found)
