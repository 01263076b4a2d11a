"""Carries out the operations of a trace on the real scheduler, with a scripted device.

The device returns the tokens of the script and keeps track of contents (`ContentModel`). A step is
executed when its result is applied; steps come in order, so that makes no difference to it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Set
from typing import NamedTuple

from serving import page_table, scheduler
from serving.plan import Output, StepPlan
from serving.replay import names, observe
from serving.replay.answers import Answers, EntryName
from serving.replay.clients import Client, accepted_drafts, make_client, step_result
from serving.replay.content import ContentModel
from serving.replay.names import EntryLog, EntryPage, PrefixNames
from serving.replay.setup import Setup, make_request
from serving.replay.trace import (
    Abort,
    Add,
    Complete,
    Op,
    Probe,
    Reset,
    Schedule,
    Step,
    token_ids,
)
from serving.replay.violations import Rule, Violation


class _OpenStep(NamedTuple):
    """A step that was scheduled and not executed.

    Attributes:
      plan: None if no request could go on.
      frozen: published slots by page, as they were after scheduling.
      withdrawn: requests that gave up the pages of their rows since.
    """

    plan: StepPlan | None
    frozen: Mapping[int, int]
    withdrawn: set[str]


class Driver:
    """One replay. `violations` grows as operations are carried out."""

    def __init__(self, setup: Setup):
        self.violations: list[Violation] = []
        self.num_steps = 0
        self._config = setup.config
        self._limits = setup.limits
        self._state = setup.state
        self._policy = setup.policy
        self._names = PrefixNames(setup.policy)
        self._open: collections.deque[_OpenStep] = collections.deque()
        self._clients: dict[str, Client] = {}
        self._log = EntryLog()
        self._known: frozenset[EntryPage] = frozenset()
        self._known_names: frozenset[EntryName] = frozenset()
        self._model = ContentModel(
            num_pages=setup.config.usable_pages + 1,
            page_tokens=setup.config.page_tokens,
            num_state_pages=len(setup.config.recurrent_groups),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and no step is in flight."""
        return scheduler.is_idle(self._state)

    @property
    def num_open(self) -> int:
        """Steps scheduled and not completed."""
        return len(self._open)

    @property
    def num_lost_pages(self) -> int:
        """Pages that are not free although no request is open."""
        return self._state.table.num_usable - self._state.table.num_free

    def apply(self, op: Op) -> Answers:
        """Carry out one operation.

        Raises:
          RequestError: the scheduler refuses a request.
          InvariantError: the state contradicts itself.
        """
        answers = self._carry_out(op)
        scheduler.check_state(self._state, self._limits)
        return answers

    def check_outputs(self) -> None:
        """Report requests that ended with other tokens than those of the script."""
        for request_id, client in self._clients.items():
            problem = client.problem()
            if problem is not None:
                self._report("output", request_id, problem)

    def _carry_out(self, op: Op) -> Answers:
        match op:
            case Add():
                return self._add(op)
            case Step(accept):
                planned, done = self._schedule(), self._complete(accept)
                return _merge(planned, done)
            case Schedule():
                return self._schedule()
            case Complete(accept):
                return self._complete(accept)
            case Abort(request_id):
                return self._abort(request_id)
            case Reset():
                return self._reset()
            case Probe():
                return self._probe(op)

    def _add(self, op: Add) -> Answers:
        request = make_request(op)
        scheduler.check_request(request, self._limits)
        self._state = scheduler.submit(self._state, self._limits, request)
        client = self._clients[op.request_id] = make_client(op)
        self._model.add(op.request_id, client.tokens)
        self._names.add(op.request_id, op.salt)
        self._names.extend(op.request_id, request.prompt)
        return self._settled()

    def _schedule(self) -> Answers:
        before, old_names = self._state, self._known_names
        reusable = {one.page for one in self._known}
        self._state, plan = scheduler.plan(before, self._limits)
        back = {news.request_id for news in plan.admitted} if plan else set[str]()
        lost = before.running.keys() - (self._state.running.keys() - back)
        for request_id in lost:
            self._withdraw(request_id)
        step_id = plan.step_id if plan else before.next_step_id
        self._log.planned(self._state.table, step_id, observe.new_pages(plan))
        self._look_at_entries()
        table, config = self._state.table, self._config
        frozen = names.frozen_slots(self._known, config.page_tokens)
        self._open.append(_OpenStep(plan, frozen, set()))
        if plan is not None:
            self._check_hits(plan, reusable)
        new_names = self._known_names
        return Answers(
            scheduled=observe.scheduled(plan),
            drafts=observe.drafts(plan),
            admitted=observe.admitted(plan),
            preempted=frozenset(lost),
            copies=observe.copies(plan, config, self._log.state_pages()),
            held=observe.held(table, tuple(self._clients), config),
            free_after_schedule=table.num_free,
            free=table.num_free,
            registered=new_names - old_names,
            evicted=old_names - new_names,
            dropped=frozenset(),
            entries=len(new_names),
        )

    def _complete(self, accept: Mapping[str, int]) -> Answers:
        step, old_names = self._open.popleft(), self._known_names
        outputs: tuple[Output, ...] = ()
        if step.plan is not None:
            self.num_steps += 1
            accepted = {
                row.request_id: accepted_drafts(row, self._clients[row.request_id], accept)
                for row in step.plan.rows
            }
            self._execute(step, step.plan, accepted)
            result = step_result(step.plan, self._clients, accepted)
            self._state, outputs = scheduler.commit(self._state, result)
        for output in outputs:
            self._receive(output)
        if step.plan is not None:
            self._log.completed(self._state.table, step.plan.step_id)
        self._look_at_entries()
        new_names = self._known_names
        return Answers(
            free=self._state.table.num_free,
            sampled={out.request_id: len(out.token_ids) for out in outputs if out.token_ids},
            finished=frozenset(out.request_id for out in outputs if out.finish_reason),
            registered=new_names - old_names,
            evicted=frozenset(),
            dropped=old_names - new_names,
            entries=len(new_names),
        )

    def _execute(self, step: _OpenStep, plan: StepPlan, accepted: Mapping[str, int]) -> None:
        now = names.frozen_slots(self._known, self._config.page_tokens)
        frozen = {page: max(now.get(page, 0), step.frozen.get(page, 0)) for page in now}
        frozen = {**step.frozen, **frozen}
        live = {row.request_id for row in plan.rows} - step.withdrawn
        self.violations += self._model.execute(plan, accepted=accepted, frozen=frozen, live=live)

    def _receive(self, output: Output) -> None:
        client = self._clients[output.request_id]
        client.receive(output)
        self._names.extend(output.request_id, client.known)
        if client.is_done:
            self._withdraw(output.request_id)

    def _abort(self, request_id: str) -> Answers:
        old_names = self._known_names
        self._state, output = scheduler.abort(self._state, request_id)
        if output is not None:
            self._receive(output)
        self._log.changed(self._state.table)
        self._look_at_entries()
        return self._settled(old_names)

    def _reset(self) -> Answers:
        old_names, table, done = self._known_names, self._state.table, True
        try:
            table = page_table.reset(table)
        except page_table.InUse:
            done = False
        self._state = dataclasses.replace(self._state, table=table)
        self._log.changed(table)
        self._look_at_entries()
        return dataclasses.replace(self._settled(old_names), ok=done)

    def _probe(self, op: Probe) -> Answers:
        tokens = token_ids(op.prompt)
        keys = names.prefix_keys(self._policy, tokens, op.salt)
        found = page_table.probe(self._state.table, keys, len(tokens) - 1)
        order = (self._config.attention_group, *self._config.recurrent_groups)
        by_group = dict(zip(order, found.group_hits, strict=True))
        group_hits = tuple(by_group[group] for group in range(len(order)))
        return Answers(hit=found.hit, junction=found.junction, group_hits=group_hits)

    def _settled(self, old_names: frozenset[EntryName] | None = None) -> Answers:
        """Answers of an operation that is no step."""
        new_names = self._known_names
        old_names = new_names if old_names is None else old_names
        return Answers(
            free=self._state.table.num_free,
            registered=new_names - old_names,
            evicted=frozenset(),
            dropped=old_names - new_names,
            entries=len(new_names),
        )

    def _withdraw(self, request_id: str) -> None:
        self._model.release(request_id)
        for step in self._open:
            step.withdrawn.add(request_id)

    def _look_at_entries(self) -> None:
        """Verify what new entries promise."""
        pages = self._log.registered()
        for new in pages - self._known:
            prefix = self._names.find(new.key)
            if prefix is None or prefix.tokens != new.tokens:
                detail = f"page {new.page} has the key of no prefix of {new.tokens} tokens"
            else:
                detail = self._model.check_entry(new.group, new.page, *prefix)
            if detail is not None:
                self._report("entry", prefix.request_id if prefix else "", detail)
        if pages != self._known:
            self._known = pages
            self._known_names = names.entry_names(pages, self._names, self._config)

    def _check_hits(self, plan: StepPlan, reusable: Set[int]) -> None:
        """A hit ends on a unit, where the first row starts, and leaves a token to compute. All of
        it is from entries, whose pages are `reusable`."""
        rows = {row.request_id: row for row in plan.rows}
        sources = {copy.target: copy.source for copy in plan.copies}
        for request_id, hit, _ in plan.admitted:
            row, known = rows[request_id], len(self._clients[request_id].known)
            if hit != row.start or hit % self._config.unit_tokens or not 0 <= hit < known:
                detail = f"hit {hit}, first row at {row.start}, {known} known tokens"
                self._report("hit", request_id, detail)
            used = row.attention_pages[: -(-hit // self._config.page_tokens)]
            pages = {sources.get(page, page) for page in used}
            if hit:
                pages.update(row.state_source)
            if not pages <= reusable:
                detail = f"pages {sorted(pages - reusable)} of a hit of {hit} are of no entry"
                self._report("hit", request_id, detail)

    def _report(self, rule: Rule, request_id: str, detail: str) -> None:
        self.violations.append(Violation(self.num_steps, rule, request_id, detail))


def _merge(planned: Answers, done: Answers) -> Answers:
    """Answers of a whole step from those of its halves."""
    evicted = planned.evicted or frozenset()
    registered = (planned.registered or frozenset()) | (done.registered or frozenset())
    return dataclasses.replace(
        planned,
        free=done.free,
        sampled=done.sampled,
        finished=done.finished,
        registered=registered - evicted,  # the others were there before
        dropped=done.dropped,
        entries=done.entries,
    )
