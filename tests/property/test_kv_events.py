"""Random workloads, whose events are replayed on a model of the cache: after every change it has
just the prefixes that the page table can serve."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping

import pytest

from serving import page_table
from serving.kv_events.events import Cleared, Event, Removed, Stored, block_hash
from serving.kv_events.held import HeldPrefixes
from serving.kv_events.news import Watch
from serving.page_table import CachePolicy, PageTable
from serving.plan import Output
from serving.replay import RECORDED, SERVED, Choices, names, run
from serving.replay.answers import Answers
from serving.replay.driver import Driver
from serving.replay.generate import generate
from serving.replay.setup import Setup
from serving.replay.trace import Add
from serving.scheduler import SchedulerState
from tests.fakes import fake_request, make_driver

# Each block with its parent and tokens, by hash.
Model = dict[int, tuple[int | None, tuple[int, ...]]]


def apply(model: Model, events: tuple[Event, ...]) -> None:
    """What a subscriber does with events; it objects to those that do not fit."""
    for event in events:
        match event:
            case Stored(parent, blocks):
                assert parent is None or parent in model
                assert blocks
                for block in blocks:
                    assert block.block_hash not in model
                    model[block.block_hash] = (parent, tuple(block.token_ids))
                    parent = block.block_hash
            case Removed(hashes):
                for one in hashes:
                    del model[one]
            case Cleared():
                assert model
                model.clear()


class Follower:
    """Follows one replica as the server does, and holds what its events say against the table."""

    def __init__(self, state: SchedulerState):
        self.watch = Watch(1, self.take)
        self.held = HeldPrefixes(state.table)
        self.model: Model = {}
        self.num_stored = self.num_removed = self.num_cleared = 0

    def take(self, news) -> None:
        for _, one in news:
            events = self.held.update(one)
            apply(self.model, events)
            self.num_stored += sum(isinstance(event, Stored) for event in events)
            self.num_removed += sum(isinstance(event, Removed) for event in events)
            self.num_cleared += sum(isinstance(event, Cleared) for event in events)

    def look(
        self,
        before: SchedulerState,
        after: SchedulerState,
        outputs: tuple[Output, ...],
        chains: Mapping[tuple[bytes, ...], tuple[int, ...]],
    ) -> None:
        """Follow a change; `chains` are the tokens of every text by its keys."""
        self.watch.look((before,), (after,), (outputs,))
        expected = servable(after.table, chains)
        assert self.model == expected
        assert self.held.num_blocks == len(expected)
        snapshot: Model = {}
        unit = after.table.policy.unit_tokens
        for parent, block in self.held.blocks():
            assert parent is None or parent in snapshot
            snapshot[block.block_hash] = (parent, tuple(block.token_ids))
            assert len(block.token_ids) == unit
        assert snapshot == expected


def servable(table: PageTable, chains: Mapping[tuple[bytes, ...], tuple[int, ...]]) -> Model:
    """All blocks up to the places where a hit can end, found by asking the table for each."""
    unit, page = table.policy.unit_tokens, table.geometry.page_tokens
    reusable = {(group, key) for group, key, _, _ in page_table.entries(table)}
    groups = range(1, 1 + table.geometry.num_state_pages)
    model: Model = {}
    for keys, tokens in chains.items():
        for count in range(len(keys), 0, -1):
            whole = range(page // unit, count, page // unit)
            wanted = {(0, keys[i - 1]) for i in (*whole, count)}
            if wanted | {(group, keys[count - 1]) for group in groups} <= reusable:
                hit = page_table.lookup(table, keys[:count], count * unit)
                assert hit.tokens == count * unit
                break
        else:
            continue
        parent = None
        for i in range(count):
            block = block_hash(keys[i])
            model[block] = (parent, tokens[i * unit : (i + 1) * unit])
            parent = block
    return model


class FollowedDriver(Driver):
    """A replay with a follower."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self.follower = Follower(self._state)
        self._outputs: list[Output] = []
        self._unsalted: set[str] = set()

    def _add(self, op: Add) -> Answers:
        if not op.salt:
            self._unsalted.add(op.request_id)
        return super()._add(op)

    def _schedule(self) -> Answers:
        return self._followed(super()._schedule)

    def _complete(self, accept: Mapping[str, int]) -> Answers:
        return self._followed(lambda: super(FollowedDriver, self)._complete(accept))

    def _abort(self, request_id: str) -> Answers:
        return self._followed(lambda: super(FollowedDriver, self)._abort(request_id))

    def _reset(self) -> Answers:
        return self._followed(super()._reset)

    def _receive(self, output: Output) -> None:
        super()._receive(output)
        self._outputs.append(output)

    def _followed(self, carry_out: Callable[[], Answers]) -> Answers:
        before = self._state
        answers = carry_out()
        texts = [self._clients[request_id].known for request_id in self._unsalted]
        chains = {names.prefix_keys(self._policy, text, ""): text for text in texts}
        self.follower.look(before, self._state, tuple(self._outputs), chains)
        self._outputs.clear()
        return answers


@pytest.mark.parametrize("choices", [RECORDED, SERVED], ids=["recorded", "served"])
def test_replayed_events_are_what_the_table_can_serve(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
):
    run_followed(range(20), choices, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("choices", [RECORDED, SERVED], ids=["recorded", "served"])
def test_many_replayed_events_are_what_the_table_can_serve(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
):
    run_followed(range(20, 40), choices, monkeypatch)
    run_followed(range(1000, 2500), choices, monkeypatch)


def run_followed(seeds: range, choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    followers: list[Follower] = []

    def make(setup: Setup) -> FollowedDriver:
        driver = FollowedDriver(setup)
        followers.append(driver.follower)
        return driver

    monkeypatch.setattr(run, "Driver", make)
    for seed in seeds:
        trace = generate(seed)
        if trace.config.spec.tail_drop:
            continue  # a hit then needs a unit more than it reuses; no server is set up so
        report, is_done, _ = run.run_to_end(trace, choices)
        assert report.error is None
        assert is_done
    assert sum(one.num_stored for one in followers) > len(followers)
    assert sum(one.num_removed for one in followers)
    assert sum(one.num_cleared for one in followers)


@pytest.mark.parametrize("num_state_pages", [1, 2])
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)])
def test_events_follow_pages_that_are_lost_in_any_order(seeds: range, num_state_pages: int):
    """Evictions from outside, aborts, logits that are not finite, resets."""
    followers = [live(seed, num_state_pages) for seed in seeds]
    assert sum(one.num_stored for one in followers) > len(followers)
    assert sum(one.num_removed for one in followers) > len(followers)
    assert sum(one.num_cleared for one in followers)


def live(seed: int, num_state_pages: int) -> Follower:
    """One random life of a scheduler."""
    rng = random.Random(seed)
    unit = rng.choice((1, 2, 4))
    policy = CachePolicy(
        unit_tokens=unit,
        retention_tokens=rng.choice((0, None)),
        key_every_unit=unit < 4,
        checkpoint_junctions=unit < 4,
        keep_answer_end=rng.random() < 0.5,
    )
    driver = make_driver(
        num_state_pages=num_state_pages,
        num_pages=rng.randint(20, 60),
        policy=policy,
        not_finite=[(f"r{i}", rng.randint(1, 30)) for i in range(0, 30, 7)],
    )
    follower = Follower(driver.state)
    texts: dict[str, tuple[int, ...]] = {}

    def change(action: Callable[[], object]) -> None:
        before = driver.state
        num_before = {name: len(driver.outputs[name]) for name in texts}
        action()
        outputs = tuple(out for name in texts for out in driver.outputs[name][num_before[name] :])
        known = [text + driver.tokens(name) for name, text in texts.items()]
        chains = {page_table.unit_keys(text, unit): text for text in known}
        follower.look(before, driver.state, outputs, chains)

    def change_table(table: PageTable) -> None:
        driver.state = dataclasses.replace(driver.state, table=table)

    for number in range(30):
        name = f"r{number}"
        begin: tuple[int, ...] = tuple(range(30))
        if texts and rng.random() < 0.7:
            earlier = rng.choice(list(texts))
            begin = texts[earlier] + driver.tokens(earlier)
        suffix = tuple(rng.randrange(3) for _ in range(rng.randint(1, 4)))
        text = (*begin[: rng.randint(0, 30)], *suffix)
        driver.submit(fake_request(name, text, max_tokens=rng.randint(1, 8), ignore_eos=True))
        texts[name] = text
        for _ in range(rng.choice((0, 1, 2, 4, 9))):
            if len(driver.state.in_flight) < 2:
                change(driver.plan)
            if driver.state.in_flight:
                change(driver.commit)
        if rng.random() < 0.1:
            change(functools.partial(driver.abort, rng.choice(list(texts))))
        table = driver.state.table
        if table.page_keys and rng.random() < 0.5:
            page = rng.choice(sorted(table.page_keys))
            change(lambda page=page: change_table(page_table.evict(driver.state.table, [page])))
        if not table.refs and rng.random() < 0.1:
            change(lambda: change_table(page_table.reset(driver.state.table)))
    return follower
