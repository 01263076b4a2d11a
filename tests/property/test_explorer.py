"""Every interleaving on small tables is sound, and the search finds faults that are put in.

Each scenario is searched to its end. `seen` says which mechanisms must have been at work, so that a
scenario cannot become empty unnoticed.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest

from k3jax.config import ConfigError
from serving import page_table, scheduler
from serving.page_table import CachePolicy, PageTable, Ticket
from serving.page_table.edit import Edit
from serving.page_table.table import NEVER, Entry
from serving.plan import StepPlan
from serving.request import RequestError
from serving.scheduler import SchedulerState
from tests.explorer import Explorer, Player, Scenario, World, explore
from tests.fakes import EOS

LIMITS = (("max_prefill_tokens", 4), ("max_context_tokens", 10))
UNIT_1 = CachePolicy(unit_tokens=1)


def tokens(count: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + count))


COPY = Scenario(
    name="two equal prompts whose tail is inside a page, one of them again after an abort",
    players=(
        Player(prompt=tokens(4), answer=(50,), attempts=2),
        Player(prompt=tokens(4), answer=(50,)),
    ),
    num_pages=5,
    policy=UNIT_1,
    limits=LIMITS,
    preempts=False,
)
ANSWER = Scenario(
    name="a second turn resumes inside the answer of the first",
    players=(
        Player(prompt=tokens(1), answer=(50, 51, 52)),
        Player(prompt=(*tokens(1), 50, 51, 7), answer=(60,)),
    ),
    num_pages=5,
    policy=CachePolicy(unit_tokens=1, keep_answer_end=True),
    limits=LIMITS,
    preempts=False,
)
SHED = Scenario(
    name="two answers whose last states are given up for pages",
    players=(
        Player(prompt=tokens(1), answer=(50, 51, 52, 53)),
        Player(prompt=tokens(2, 20), answer=(60, 61, 62)),
    ),
    num_pages=6,
    policy=CachePolicy(unit_tokens=1, keep_answer_end=True),
    limits=LIMITS,
    preempts=False,
    evicts=False,
)
REMOTE = Scenario(
    name="a prefix comes from a remote writer, in two attempts",
    players=(
        Player(prompt=tokens(3), answer=(50,)),
        Player(prompt=tokens(3), answer=(60,), attempts=2, remote_tokens=2),
    ),
    num_pages=5,
    policy=UNIT_1,
    limits=LIMITS,
    preempts=False,
    evicts=False,
)
# With the mechanisms that must have been at work, and the least number of worlds.
SCENARIOS: tuple[tuple[Scenario, set[str], int], ...] = (
    (COPY, {"copy", "deferral", "eviction", "hit"}, 4000),
    (ANSWER, {"answer end", "copy", "hit", "preemption"}, 3000),
    (SHED, {"answer end", "eviction"}, 1000),
    (REMOTE, {"hit", "preemption"}, 2000),
    (
        Scenario(
            name="two remote writers, and requests that read what they brought",
            players=(
                Player(prompt=tokens(4), answer=(50,), attempts=2, remote_tokens=2),
                Player(prompt=tokens(4), answer=(60,), remote_tokens=3),
                Player(prompt=tokens(3), answer=(70,)),
            ),
            num_pages=5,
            policy=UNIT_1,
            limits=LIMITS,
            depth=1,
            aborts=False,
            preempts=False,
            evicts=False,
        ),
        {"hit", "preemption"},
        6000,
    ),
    (
        Scenario(
            name="three prompts that share a page: the second finds a junction",
            players=(
                Player(prompt=(*tokens(2), 7, 8, 9), answer=(50,)),
                Player(prompt=(*tokens(2), 10, 11, 12), answer=(60,)),
                Player(prompt=(*tokens(2), 13), answer=(60,)),
            ),
            num_pages=6,
            policy=dataclasses.replace(UNIT_1, key_every_unit=True, checkpoint_junctions=True),
            limits=LIMITS,
            depth=1,
            aborts=False,
            preempts=False,
            evicts=False,
        ),
        {"hit", "junction"},
        100,
    ),
    (
        Scenario(
            name="states exported from inside a chunk, mixed steps",
            players=(
                Player(prompt=tokens(5), answer=(50,)),
                Player(prompt=tokens(5), answer=(50, EOS, 51)),
            ),
            num_pages=6,
            policy=CachePolicy(unit_tokens=1, export_tokens=1, retention_tokens=None),
            limits=(("max_prefill_tokens", 6), ("max_context_tokens", 10), ("batching", "mixed")),
            evicts=False,
        ),
        {"eviction", "export", "hit", "deferral"},
        100,
    ),
    (
        Scenario(
            name="two recurrent groups",
            players=(
                Player(prompt=tokens(3), answer=(50, 51)),
                Player(prompt=tokens(3), answer=(60,)),
            ),
            num_pages=6,
            num_state_pages=2,
            policy=CachePolicy(unit_tokens=2),
            limits=LIMITS,
        ),
        {"eviction", "hit", "junction"},
        100,
    ),
    (
        Scenario(
            name="three recurrent groups, in the smallest pool",
            players=(
                Player(prompt=tokens(3), answer=(50, 51), attempts=2),
                Player(prompt=(*tokens(3), 9), answer=(60,)),
            ),
            num_pages=6,
            num_state_pages=3,
            page_tokens=4,
            policy=CachePolicy(unit_tokens=2, keep_answer_end=True),
            limits=LIMITS,
            preempts=False,
        ),
        {"eviction"},
        100,
    ),
    (
        Scenario(
            name="three recurrent groups, in the smallest pool in which a prefix is reused",
            players=(
                Player(prompt=tokens(3), answer=(50,)),
                Player(prompt=tokens(4), answer=(60,)),
            ),
            num_pages=8,
            num_state_pages=3,
            page_tokens=4,
            policy=CachePolicy(unit_tokens=2),
            limits=LIMITS,
            preempts=False,
        ),
        {"copy", "eviction", "hit"},
        100,
    ),
    (
        Scenario(
            name="answers with a stop token, logits that are not finite",
            players=(
                Player(prompt=tokens(3), answer=(50, EOS, 51), attempts=2),
                Player(prompt=tokens(3), answer=(50, EOS, 51)),
            ),
            num_pages=5,
            policy=UNIT_1,
            limits=LIMITS,
            preempts=False,
            evicts=False,
            breaks=True,
        ),
        {"eviction", "hit"},
        100,
    ),
    (
        Scenario(
            name="clients that do not keep up",
            players=(
                Player(prompt=tokens(3), answer=(50, 51)),
                Player(prompt=tokens(3), answer=(50, 51)),
            ),
            num_pages=5,
            policy=UNIT_1,
            limits=LIMITS,
            evicts=False,
            pauses=True,
        ),
        {"deferral", "hit", "preemption"},
        100,
    ),
)


@pytest.mark.parametrize("number", range(len(SCENARIOS)))
def test_every_interleaving_is_sound(number: int):
    scenario, mechanisms, least = SCENARIOS[number]
    report = explore(scenario, max_worlds=100_000)
    print(report)
    assert report.problem is None, f"{scenario.name}: {report}"
    assert report.is_complete
    assert report.seen >= mechanisms
    assert report.num_worlds >= least


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCENARIOS)))
def test_all_events_together_are_sound(number: int):
    """The scenarios again, with every kind of event, as far as the search gets."""
    scenario = dataclasses.replace(
        SCENARIOS[number][0], aborts=True, preempts=True, evicts=True, breaks=True, pauses=True
    )
    report = explore(scenario, max_worlds=10_000)
    assert report.problem is None, f"{scenario.name}: {report}"
    assert report.num_worlds > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 1000, 50))
def test_random_scenarios_are_sound(seed: int):
    """The first thousand worlds of scenarios of all kinds."""
    num_searched = 0
    for one in range(seed, seed + 50):
        scenario = random_scenario(one)
        try:
            explorer = Explorer(scenario)
        except (ConfigError, RequestError):  # one of the prompts does not fit the pool
            continue
        report = explorer.explore(max_worlds=1000)
        assert report.problem is None, f"{scenario}: {report}"
        num_searched += 1
    assert num_searched > 10


def random_scenario(seed: int) -> Scenario:
    """Prompts that are equal, share a prefix, or continue an answer, on a table that is tight."""
    rng = random.Random(seed)
    page_tokens = rng.choice((2, 2, 3, 4))
    num_state_pages = rng.choice((1, 1, 1, 2, 2, 3))
    shared = tokens(rng.randint(1, 2 * page_tokens + 1))
    answer = tokens(rng.randint(1, 3), 50)

    def player() -> Player:
        prompt, own = shared, answer
        choice = rng.random()
        if choice < 0.3:
            prompt = shared[: rng.randint(0, len(shared))] + tokens(rng.randint(1, page_tokens), 20)
        elif choice < 0.5:
            prompt = shared + answer[: rng.randint(1, len(answer))] + tokens(rng.randint(0, 2), 30)
        if rng.random() < 0.4:
            own = tokens(rng.randint(1, 3), 60)
        if rng.random() < 0.2:
            own = (*own[:1], EOS, *own[1:])
        is_remote = len(prompt) > 1 and rng.random() < 0.25
        return Player(
            prompt=prompt,
            answer=own,
            attempts=rng.choice((1, 2)),
            remote_tokens=rng.randint(1, len(prompt) - 1) if is_remote else 0,
        )

    players = tuple(player() for _ in range(rng.choice((2, 2, 3))))
    units = [unit for unit in range(1, page_tokens + 1) if page_tokens % unit == 0]
    policy = CachePolicy(
        unit_tokens=rng.choice(units),
        retention_tokens=rng.choice((0, 0, None, page_tokens, 2 * page_tokens)),
        tail_drop=rng.random() < 0.15,
        hash_lookahead_tokens=rng.choice((0, 0, 0, 0, 1)),
        checkpoint_junctions=rng.random() < 0.3,
        key_every_unit=rng.random() < 0.3,
        export_tokens=rng.choice((None, None, 1, 2)),
        keep_answer_end=rng.random() < 0.5,
    )
    limits = {
        "max_prefill_tokens": rng.choice((page_tokens, 2 * page_tokens, 8, 3)),
        "max_context_tokens": 1 + max(len(one.prompt + one.answer) for one in players),
        "batching": rng.choice(("alternate", "alternate", "mixed")),
        "reserve_full_prompt": rng.random() < 0.7,
        "reserve_running": rng.random() < 0.7,
        "preempts_itself": rng.random() < 0.3,
        "long_prefill_cap_tokens": rng.choice((0, 0, 0, page_tokens)),
        "watermark_pages": rng.choice((0, 0, 0, 1)),
    }
    return Scenario(
        name=f"seed {seed}",
        players=players,
        num_pages=rng.randint(num_state_pages + 2, 6 if num_state_pages < 3 else 8),
        page_tokens=page_tokens,
        num_state_pages=num_state_pages,
        policy=policy,
        limits=tuple(limits.items()),
        depth=rng.choice((1, 2, 2)),
        aborts=rng.random() < 0.7,
        preempts=rng.random() < 0.4,
        evicts=rng.random() < 0.5,
        breaks=rng.random() < 0.15,
        pauses=rng.random() < 0.2,
    )


# ---- faults that are put in -------------------------------------------------------------------


def problem_of(scenario: Scenario) -> str:
    """What the search finds, with a shortest way to it."""
    report = explore(scenario, max_worlds=20_000)
    print(report)
    assert report.problem is not None
    assert report.trace
    return report.problem


def test_entries_that_are_visible_at_once_are_found(monkeypatch: pytest.MonkeyPatch):
    """The next row of the same step may then read what the step is going to write."""

    publish = Edit.publish

    def publish_at_once(edit: Edit, entry: Entry, key: bytes, **names: Any) -> bool:
        return publish(edit, entry._replace(step=NEVER), key, **names)

    monkeypatch.setattr(Edit, "publish", publish_at_once)
    # It takes a reader to notice: the rule that visible entries have their bytes is off.
    monkeypatch.setattr(Explorer, "judge", lambda self, world: None)
    assert "'b' starts at 2 and reads attention page" in problem_of(COPY)


def test_a_missing_copy_is_found(monkeypatch: pytest.MonkeyPatch):
    plan = scheduler.plan

    def without_copies(*args: object, **options: object) -> tuple[SchedulerState, StepPlan | None]:
        state, step = plan(*args, **options)
        return state, step and dataclasses.replace(step, copies=())

    monkeypatch.setattr(scheduler, "plan", without_copies)
    assert "starts at 3 and reads attention page" in problem_of(COPY)


def test_clearing_after_the_pages_were_shown_to_a_writer_is_found(monkeypatch: pytest.MonkeyPatch):
    advertise = page_table.advertise

    def too_early(table: PageTable, ticket_id: str) -> tuple[PageTable, Ticket]:
        """As if the clearing were done."""
        step = table.tickets[ticket_id].clear_step
        after, ticket = advertise(page_table.commit_step(table, step), ticket_id)
        return page_table.commit_step(after, table.committed), ticket

    monkeypatch.setattr(page_table, "advertise", too_early)
    assert "is under transfer, and is cleared" in problem_of(REMOTE)


def test_a_source_that_may_be_handed_out_in_its_step_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Edit, "pin", Edit.release)
    assert "resumes at 2 from state page" in problem_of(SHED)


def test_pages_that_stay_pinned_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_table, "settle", lambda table: table)
    assert "pages are lost" in problem_of(COPY)


def test_a_request_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch):
    lookup = page_table.lookup
    monkeypatch.setattr(page_table, "lookup", lambda *args: lookup(*args)._replace(is_ready=False))
    assert problem_of(SHED) == "it never comes to rest"


# ---- the search itself ------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [COPY, ANSWER, REMOTE], ids=["copy", "answer", "remote"])
def test_worlds_with_equal_keys_can_do_the_same_things(scenario: Scenario):
    """Otherwise the search would leave out what only the second of them leads to."""
    explorer = Explorer(scenario)
    known = {explorer.key(explorer.start): explorer.start}
    todo = collections.deque([explorer.start])
    num_compared = 0
    while todo and len(known) < 300:
        world = todo.popleft()
        for event in explorer.events(world):
            after = explorer.apply(world, event)
            first = known.setdefault(explorer.key(after), after)
            if first is after:
                todo.append(after)
            elif after is not world:
                assert successors(explorer, after) == successors(explorer, first)
                num_compared += 1
    assert num_compared > 100


def successors(explorer: Explorer, world: World) -> collections.Counter[tuple[str, bytes]]:
    """Pages have other numbers in another world, so the events' targets do not count."""
    return collections.Counter(
        (event.verb, explorer.key(explorer.apply(world, event))) for event in explorer.events(world)
    )
