"""Every interleaving of what can happen on a small table, breadth first.

From each world every event that is possible is tried (`game`), and each new world is
judged: the device's contents, the invariants of state and table, the bytes of every visible entry,
and at rest that no page is lost. At last every world must come to rest if nothing happens from
outside any more. Worlds that differ only in what makes no difference are one (`key`), so
the search ends when every reachable world has been seen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from serving.page_table import OutOfPages
from serving.request import InvariantError
from serving.scheduler.state import InFlight
from tests.explorer.device import Wrong
from tests.explorer.game import Game
from tests.explorer.key import world_key
from tests.explorer.world import Event, Scenario, World

FOREVER = 10**9


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a search.

    Attributes:
      problem: the first one found, with a shortest way to it; None if there is none.
      is_complete: whether every reachable world was seen.
      seen: what happened at least once, for tests of the scenarios themselves.
    """

    num_worlds: int
    num_events: int
    is_complete: bool
    problem: str | None = None
    trace: tuple[str, ...] = ()
    seen: frozenset[str] = frozenset()

    def __str__(self) -> str:
        head = f"{self.num_worlds} worlds, {self.num_events} events"
        if self.problem is None:
            return head
        return "\n".join((f"{head}: {self.problem}", *self.trace))


class Explorer(Game):
    """The search of one scenario."""

    def explore(self, max_worlds: int = FOREVER) -> Report:
        """Search breadth first, up to a number of worlds."""
        numbers = {self.key(self.start): 0}
        parents: list[tuple[int, Event]] = [(0, Event("start"))]
        rests: list[int] = []
        drains: dict[str, list[int]] = {verb: [] for verb in ("commit", "plan")}
        todo = collections.deque([self.start])
        num_events = index = 0
        while todo and len(parents) < max_worlds:
            world = todo.popleft()
            if world.is_at_rest:
                rests.append(index)
            follow: dict[str, int] = {}
            for event in self.events(world):
                num_events += 1
                try:
                    after = self.apply(world, event)
                    if after is world:
                        continue
                    key = self.key(after)
                    number = numbers.get(key)
                    if number is None:
                        number = numbers[key] = len(parents)
                        parents.append((index, event))
                        todo.append(after)
                        self.judge(after)
                except (Wrong, InvariantError, OutOfPages) as error:
                    way = (*_way(parents, index), event)
                    return self._report(len(parents), num_events, str(error), way)
                if number != index:
                    follow.setdefault(event.verb, number)
            for first, chain in drains.items():
                chain.append(_next_alone(follow, first, index))
            index += 1
        rests += range(index, len(parents))  # not tried: nobody knows
        for chain in drains.values():
            stuck = _stuck(chain, rests)
            if stuck is not None:
                way = _way(parents, stuck)
                return self._report(len(parents), num_events, "it never comes to rest", way)
        return self._report(len(parents), num_events, is_complete=not todo)

    def _report(
        self,
        num_worlds: int,
        num_events: int,
        problem: str | None = None,
        way: tuple[Event, ...] = (),
        *,
        is_complete: bool = False,
    ) -> Report:
        trace = self.tell(way) if problem is not None else ()
        seen = frozenset(self.seen)
        return Report(num_worlds, num_events, is_complete, problem, trace, seen)

    def tell(self, way: tuple[Event, ...]) -> tuple[str, ...]:
        """A line for each event of a way from the start."""
        world, lines = self.start, []
        for event in way:
            who = f" {event.target}" if event.verb == "evict" else ""
            if event.target >= 0 and not who:
                who = f" {self.names[event.target]}"
            before = len(world.state.in_flight)
            try:
                world = self.apply(world, event)
            except (Wrong, InvariantError, OutOfPages) as error:
                lines.append(f"{event.verb}{who}: {error}")
                break
            told = f"{event.verb}{who}"
            if len(world.state.in_flight) > before:
                told += f": {_step_words(world.state.in_flight[-1])}"
            lines.append(told)
        return tuple(lines)

    def key(self, world: World) -> bytes:
        """What tells a world from others."""
        return world_key(world, self.names, self.key_numbers, has_remote=self.has_remote)


def explore(scenario: Scenario, max_worlds: int = FOREVER) -> Report:
    """Search a scenario."""
    return Explorer(scenario).explore(max_worlds)


def _step_words(step: InFlight) -> str:
    rows = [
        f"{row.request_id} {row.start}..{row.start + row.length} in {row.attention_pages}, "
        f"state {row.state_source} to {row.state_target}"
        for row in step.rows
    ]
    return f"step {step.step_id}: {'; '.join(rows) or 'only clears'}"


def _way(parents: list[tuple[int, Event]], index: int) -> tuple[Event, ...]:
    events: list[Event] = []
    while index:
        index, event = parents[index]
        events.append(event)
    return tuple(reversed(events))


def _next_alone(follow: Mapping[str, int], first: str, index: int) -> int:
    """The next world if nothing happens from outside; the same one if nothing can happen."""
    second = "plan" if first == "commit" else "commit"
    order = ("execute", first, second, "advertise", "write", "accept", "fail")
    return next((follow[verb] for verb in order if verb in follow), index)


def _stuck(chain: list[int], rests: list[int]) -> int | None:
    """The first world from which none of the worlds at rest is reached; None if there is none."""
    before: dict[int, list[int]] = collections.defaultdict(list)
    for index, after in enumerate(chain):
        before[after].append(index)
    reached, todo = set(rests), list(rests)
    while todo:
        fresh = [one for one in before[todo.pop()] if one not in reached]
        reached.update(fresh)
        todo += fresh
    return next((index for index in range(len(chain)) if index not in reached), None)
