"""Values of the explorer: a scenario, and a world in which it can be.

A world is the real scheduler's state with the real page table in it, a device as a value, and what
the clients and remote writers have done so far.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from serving import scheduler
from serving.page_table import CachePolicy
from serving.plan import StepPlan
from serving.scheduler import SchedulerState
from tests.explorer.device import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Player:
    """A request of the script.

    Attributes:
      answer: what the device samples; the request ends with it, or with an `EOS` inside.
      attempts: how often it may be submitted; again only after an abort, with the same prompt.
      remote_tokens: tokens of the prompt that a remote writer brings; 0: it is an ordinary request.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    attempts: int = 1
    remote_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A small server and what may happen to it.

    Attributes:
      num_pages: usable ones.
      limits: fields of `fake_limits`.
      depth: steps that may be planned and not committed.
      aborts, preempts, evicts, breaks, pauses: whether requests are aborted, preempted from
        outside, pages evicted, logits not finite, requests paused.
    """

    name: str
    players: tuple[Player, ...]
    num_pages: int
    policy: CachePolicy
    page_tokens: int = 2
    num_state_pages: int = 1
    limits: tuple[tuple[str, object], ...] = ()
    max_rows: int = 2
    depth: int = 2
    aborts: bool = True
    preempts: bool = True
    evicts: bool = True
    breaks: bool = False
    pauses: bool = False


class Event(NamedTuple):
    """`target` is the number of a player or of a page, or -1."""

    verb: str
    target: int = -1


class Life(NamedTuple):
    """Of a player: `status` is one of new, live, remote, gone, done."""

    status: str = "new"
    num_attempts: int = 0


class World(NamedTuple):
    """Everything that decides what can happen next.

    Attributes:
      queue: steps that were dispatched and that the device has not executed.
      clears: pages that the next step clears for a remote writer.
      landed: players whose remote writer has written.
    """

    state: SchedulerState
    device: Device
    lives: tuple[Life, ...]
    queue: tuple[StepPlan, ...] = ()
    clears: tuple[int, ...] = ()
    landed: tuple[int, ...] = ()

    @property
    def is_at_rest(self) -> bool:
        return (
            scheduler.is_idle(self.state)
            and not self.queue
            and not self.clears
            and not self.state.table.tickets
        )
