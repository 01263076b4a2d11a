"""A small server as a value, and all that can happen to it, for the explorer.

The scheduler and the page table are the real ones; the device is a value (`device`). An
event is one call from outside: a request arrives or is aborted, a step is planned, executed or
committed, a page is evicted, a remote writer gets or gives pages. Free pages have no content, so
which of them is handed out makes no difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from serving import page_table, scheduler
from serving.page_table import CachePolicy, NotReceivable, OutOfPages, PageTable, unit_keys
from serving.plan import Output, StepPlan, StepResult
from serving.request import Request
from serving.scheduler import Limits, SchedulerState
from serving.scheduler.state import InFlight, Running, preempt
from serving.scheduler.token_log import EMPTY_LOG
from tests.explorer.device import (
    POISON,
    Device,
    Story,
    Wrong,
    check_entry,
    execute,
    fresh_device,
    make_stories,
    write_remotely,
)
from tests.explorer.world import Event, Life, Player, Scenario, World
from tests.fakes import EOS, fake_geometry, fake_limits, fake_request


class Game:
    """The rules of one scenario. `seen` grows with the mechanisms that were at work."""

    def __init__(self, scenario: Scenario):
        geometry = fake_geometry(
            page_tokens=scenario.page_tokens, num_state_pages=scenario.num_state_pages
        )
        self.scenario = scenario
        self.names = tuple("abcdefgh"[: len(scenario.players)])
        self.requests = tuple(map(_request, self.names, scenario.players))
        self.stories = make_stories(
            {
                name: player.prompt + player.answer
                for name, player in zip(self.names, scenario.players, strict=True)
            }
        )
        self.limits: Limits = fake_limits(
            geometry,
            num_pages=scenario.num_pages + 1,
            max_rows=scenario.max_rows,
            **dict(scenario.limits),
        )
        for request in self.requests:
            scheduler.check_request(request, self.limits)
        self.has_remote = any(player.remote_tokens for player in scenario.players)
        self.prefixes = _prefixes_by_key(self.stories, scenario.policy)
        self.key_numbers = {key: number for number, key in enumerate(self.prefixes)}
        self.seen: set[str] = set()
        table = page_table.empty_table(geometry, scenario.num_pages + 1, scenario.policy)
        self.start = World(
            state=scheduler.initial_state(table, self.limits),
            device=fresh_device(scenario.num_pages + 1, scenario.max_rows),
            lives=(Life(),) * len(scenario.players),
        )

    # ---- events ----

    def events(self, world: World) -> Iterator[Event]:
        """What can happen; some of it may turn out to change nothing."""
        scenario, state = self.scenario, world.state
        if world.queue:
            yield Event("execute")
        executed = len(state.in_flight) - len(world.queue)
        if executed:
            yield Event("commit")
            if scenario.breaks:
                yield from (Event("break", i) for i in self._sampling(state))
        if len(state.in_flight) < scenario.depth:
            yield Event("plan")
            if scenario.pauses:
                yield from (Event("plan without", self._number(one)) for one in state.running)
        for number, (player, life) in enumerate(zip(scenario.players, world.lives, strict=True)):
            if life.status in ("new", "gone") and life.num_attempts < player.attempts:
                if not player.remote_tokens:
                    yield Event("submit", number)
                elif self.names[number] not in state.table.tickets:
                    yield Event("receive", number)
            if scenario.aborts and life.status == "live":
                yield Event("abort", number)
        yield from self._ticket_events(world)
        if scenario.preempts:
            yield from (Event("preempt", self._number(one)) for one in state.running)
        if scenario.evicts:
            yield from (Event("evict", page) for page in state.table.idle)

    def _ticket_events(self, world: World) -> Iterator[Event]:
        for name, ticket in world.state.table.tickets.items():
            number = self._number(name)
            if ticket.stage == "held":
                yield Event("advertise", number)
            elif number not in world.landed:
                yield Event("write", number)
            if ticket.stage == "receiving" and number in world.landed:
                yield Event("accept", number)
            if ticket.stage != "held":
                yield Event("fail", number)
            if ticket.stage != "expired":
                yield Event("expire", number)

    def _sampling(self, state: SchedulerState) -> tuple[int, ...]:
        step = state.in_flight[0]
        return tuple(
            self._number(r.request_id) for r in step.rows if r.samples and r.request_id in step.live
        )

    def apply(self, world: World, event: Event) -> World:
        """The world after an event; the same one if the event is not possible now.

        Raises:
          Wrong, InvariantError: something is wrong.
        """
        method = getattr(self, "_" + event.verb.replace(" ", "_"))
        after = method(world) if event.target < 0 else method(world, event.target)
        return after if after is world else self._settled(after)

    def _submit(self, world: World, number: int) -> World:
        state = scheduler.submit(world.state, self.limits, self.requests[number])
        return self._begin(world._replace(state=state), number, "live")

    def _abort(self, world: World, number: int) -> World:
        state, output = scheduler.abort(world.state, self.names[number])
        if output is None:
            raise Wrong(f"{self.names[number]!r} is not live; expected it to be")
        return self._end(world._replace(state=state), number, "gone")

    def _preempt(self, world: World, number: int) -> World:
        return world._replace(state=preempt(world.state, self.names[number]))

    def _evict(self, world: World, page: int) -> World:
        return self._with_table(world, page_table.evict(world.state.table, (page,)))

    def _plan(self, world: World, paused: int = -1) -> World:
        without = frozenset(self.names[paused : paused + 1] if paused >= 0 else ())
        state, step = scheduler.plan(world.state, self.limits, paused=without)
        self._note(world.state, state, step)
        if step is not None:
            more = tuple(page for page in world.clears if page not in step.clear_pages)
            step = dataclasses.replace(step, clear_pages=step.clear_pages + more)
        elif world.clears:
            step = StepPlan(
                step_id=state.next_step_id,
                bucket=self.limits.buckets[0],
                rows=(),
                clear_pages=world.clears,
            )
            state = dataclasses.replace(
                state,
                in_flight=(*state.in_flight, InFlight(step_id=step.step_id, rows=(), live={})),
                next_step_id=state.next_step_id + 1,
            )
        world = world._replace(state=state)
        if step is None:
            return world
        world = world._replace(queue=(*world.queue, step), clears=())
        return world if self.has_remote else self._execute(world)

    _plan_without = _plan

    def _execute(self, world: World) -> World:
        """The device runs the oldest step. When that is matters only beside remote writers."""
        step, *later = world.queue
        fenced = {
            page
            for ticket in world.state.table.tickets.values()
            if ticket.stage != "held"
            for page in ticket.pages
        }
        device = execute(world.device, step, self.stories, self.scenario.page_tokens, fenced)
        return world._replace(device=device, queue=tuple(later))

    def _commit(self, world: World, broken: int = -1) -> World:
        step = world.state.in_flight[0]
        tokens = [self._sampled(row.request_id, row.start + row.length) for row in step.rows]
        finite = [broken < 0 or row.request_id != self.names[broken] for row in step.rows]
        result = StepResult(
            step_id=step.step_id,
            tokens=np.array(tokens, np.int32),
            finite=np.array(finite, np.bool_),
        )
        state, outputs = scheduler.commit(world.state, result)
        world = world._replace(state=state)
        for output in outputs:
            world = self._receive_output(world, output)
        return world

    _break = _commit

    def _receive_output(self, world: World, output: Output) -> World:
        number = self._number(output.request_id)
        answer = self.scenario.players[number].answer
        if EOS in answer:
            answer = answer[: answer.index(EOS) + 1]
        count = output.completion_tokens
        if output.token_ids != answer[count - len(output.token_ids) : count]:
            raise Wrong(f"{output.request_id!r} gets {output.token_ids}, which are not its tokens")
        if output.finish_reason is None:
            return world
        if output.finish_reason != "error" and count != len(answer):
            raise Wrong(f"{output.request_id!r} ends after {count} tokens of {len(answer)}")
        return self._end(world, number, "gone" if output.finish_reason == "error" else "done")

    # ---- transfers ----

    def _receive(self, world: World, number: int) -> World:
        player, state = self.scenario.players[number], world.state
        try:
            table, effects = page_table.receive(
                state.table,
                self.names[number],
                player.remote_tokens,
                clear_step=state.next_step_id,
                expires_at=number,
            )
        except OutOfPages:
            return world
        clears = tuple(page for effect in effects for page in effect.pages)
        world = self._with_table(world, table)
        world = world._replace(clears=tuple(dict.fromkeys((*world.clears, *clears))))
        return self._begin(world, number, "remote")

    def _advertise(self, world: World, number: int) -> World:
        try:
            table, _ = page_table.advertise(world.state.table, self.names[number])
        except NotReceivable:
            return world
        return self._with_table(world, table)

    def _write(self, world: World, number: int) -> World:
        ticket, story = world.state.table.tickets[self.names[number]], self._story(number)
        device = write_remotely(
            world.device,
            story,
            ticket.tokens,
            ticket.attention,
            ticket.state,
            self.scenario.page_tokens,
        )
        return world._replace(device=device, landed=(*world.landed, number))

    def _accept(self, world: World, number: int) -> World:
        """The pages go to a request that runs on after them."""
        state, request, name = world.state, self.requests[number], self.names[number]
        slots = {row.slot for row in state.running.values()}
        if len(slots) == self.limits.max_rows:
            return world
        tokens = state.table.tickets[name].tokens
        chain = scheduler.chain_of_prompt(state.table, request)
        table = page_table.accept(
            state.table, name, name, prompt_tokens=len(request.prompt), keys=chain.keys
        )
        row = Running(
            request=request,
            output=EMPTY_LOG,
            slot=min({*range(self.limits.max_rows)} - slots),
            prefill_end=len(request.prompt),
            computed=tokens,
            chain=chain,
            arrival=0,
            cached_tokens=tokens,
        )
        state = dataclasses.replace(state, table=table, running={**state.running, name: row})
        world = world._replace(state=state, landed=_without(world.landed, number))
        return self._end(world, number, "live")

    def _fail(self, world: World, number: int) -> World:
        table = page_table.fail_transfer(world.state.table, self.names[number])
        world = self._with_table(world, table)._replace(landed=_without(world.landed, number))
        return self._end(world, number, "gone")

    def _expire(self, world: World, number: int) -> World:
        """The time of a ticket comes, and that of the players before it."""
        table = page_table.expire(world.state.table, number)
        for name, ticket in world.state.table.tickets.items():
            if ticket.expires_at <= number:
                world = self._end(world, self._number(name), "gone")
        return self._with_table(world, table)

    # ---- judgement ----

    def judge(self, world: World) -> None:
        """Verify what must hold in every world.

        Raises:
          Wrong, InvariantError: it does not.
        """
        scheduler.check_state(world.state, self.limits)
        table = world.state.table
        for group, key, page, tokens in page_table.entries(table):
            check_entry(
                world.device, group, page, tokens, self.prefixes[key], self.scenario.page_tokens
            )
        if world.is_at_rest and (table.refs or table.pins or table.num_free < table.num_usable):
            raise Wrong(f"pages are lost: {table.num_free} of {table.num_usable} are free at rest")

    def _settled(self, world: World) -> World:
        """Nobody may rely on a free page, except steps on their way to the device."""
        used = {page for step in world.queue for row in step.rows for page in _row_pages(row)}
        used |= {copy.source for step in world.queue for copy in step.copies}
        used |= {copy.target for step in world.queue for copy in step.copies}
        free_bits = world.state.table.free_bits
        pages = tuple(
            POISON if free_bits >> page & 1 and page not in used else content
            for page, content in enumerate(world.device.pages)
        )
        slots = {row.slot for row in world.state.running.values()}
        slots |= {row.slot for step in world.queue for row in step.rows}
        buffer = tuple(
            token if slot in slots else 0 for slot, token in enumerate(world.device.token_buffer)
        )
        return world._replace(device=Device(pages, buffer))

    # ---- small helpers ----

    def _number(self, name: str) -> int:
        return self.names.index(name)

    def _story(self, number: int) -> Story:
        return self.stories[self.names[number]]

    def _sampled(self, name: str, position: int) -> int:
        return (
            self.stories[name].tokens[position] if position < len(self.stories[name].tokens) else 0
        )

    def _with_table(self, world: World, table: PageTable) -> World:
        return world._replace(state=dataclasses.replace(world.state, table=table))

    def _begin(self, world: World, number: int, status: str) -> World:
        life = Life(status, world.lives[number].num_attempts + 1)
        return world._replace(lives=(*world.lives[:number], life, *world.lives[number + 1 :]))

    def _end(self, world: World, number: int, status: str) -> World:
        life = world.lives[number]._replace(status=status)
        return world._replace(lives=(*world.lives[:number], life, *world.lives[number + 1 :]))

    def _note(self, before: SchedulerState, after: SchedulerState, step: StepPlan | None) -> None:
        """Remember kinds of steps that occur."""
        if after.num_preemptions > before.num_preemptions:
            self.seen.add("preemption")
        if after.table.num_evicted > before.table.num_evicted:
            self.seen.add("eviction")
        if step is None:
            waits = any(
                not page_table.lookup(before.table, one.chain.keys, one.num_tokens - 1).is_ready
                for one in before.waiting[:1]
            )
            self.seen.update({"deferral"} if waits else ())
            return
        if step.copies:
            self.seen.add("copy")
        for one in step.admitted:
            self.seen.update({"hit"} if one.hit_tokens else ())
            self.seen.update({"junction"} if one.junction else ())
        for row in step.rows:
            self.seen.update({"export"} if row.export is not None else ())
        owners = after.table.owners.values()
        self.seen.update({"answer end"} if any(one.answer_end for one in owners) else ())


def _request(name: str, player: Player) -> Request:
    return fake_request(name, player.prompt, max_tokens=len(player.answer))


def _prefixes_by_key(
    stories: Mapping[str, Story], policy: CachePolicy
) -> dict[bytes, tuple[int, ...]]:
    """Identities of the prefixes that each key can name."""
    named: dict[bytes, tuple[int, ...]] = {}
    for story in stories.values():
        keys = unit_keys(story.tokens, policy.unit_tokens, lookahead=policy.hash_lookahead_tokens)
        for index, key in enumerate(keys, start=1):
            named[key] = story.prefixes[: index * policy.unit_tokens + 1]
    return named


def _row_pages(row: object) -> tuple[int, ...]:
    exported = row.export.pages if row.export is not None else ()
    return (*row.attention_pages, *row.state_source, *row.state_target, *exported)


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(one for one in numbers if one != number)
