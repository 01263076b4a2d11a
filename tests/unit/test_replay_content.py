"""The content model on plans made by hand: sound ones pass, and each fault is named."""

from __future__ import annotations

import pytest

from k3jax.buckets import Bucket
from serving.plan import PageCopy, RowPlan, StateExport, StepPlan
from serving.replay import ContentModel
from serving.request import SamplingParams

SAMPLING = SamplingParams(seed=0, max_tokens=8)
WIDTH = 4  # tokens of a page
A = tuple(range(10, 22))
B = (*A[:6], *range(50, 56))  # shares a page and a half with A


class Device:
    """A content model with two requests, `a` and `b`, and short ways to make steps."""

    def __init__(self, num_state_pages: int = 1) -> None:
        self.model = ContentModel(num_pages=16, page_tokens=WIDTH, num_state_pages=num_state_pages)
        self.model.add("a", A)
        self.model.add("b", B)
        self.num_steps = 0

    def step(
        self,
        *rows: RowPlan,
        clear: tuple[int, ...] = (),
        copies: tuple[PageCopy, ...] = (),
        accepted: dict[str, int] | None = None,
        frozen: dict[int, int] | None = None,
    ) -> list[str]:
        """Run a step; returns the rules that it breaks."""
        plan = StepPlan(
            step_id=self.num_steps,
            bucket=Bucket("prefill", 32, 4, 8),
            rows=rows,
            clear_pages=clear,
            copies=copies,
        )
        self.num_steps += 1
        violations = self.model.execute(
            plan,
            accepted=accepted or {},
            frozen=frozen or {},
            live={row.request_id for row in rows},
        )
        return [violation.rule for violation in violations]


def row(
    request_id: str,
    start: int,
    end: int,
    pages: tuple[int, ...],
    source: tuple[int, ...],
    target: tuple[int, ...] | None = None,
    **fields: object,
) -> RowPlan:
    tokens = {"a": A, "b": B}[request_id][start:end]
    made = RowPlan(
        request_id=request_id,
        slot={"a": 0, "b": 1}[request_id],
        start=start,
        length=end - start,
        tokens=tokens,
        attention_pages=pages,
        state_source=source,
        state_target=source if target is None else target,
        samples=False,
        sampling=SAMPLING,
    )
    return made._replace(**fields)


def after_six_tokens_of_a() -> Device:
    """`a` has computed 6 tokens in pages 1 and 2; its state is in page 9."""
    device = Device()
    assert device.step(row("a", 0, 6, (1, 2), (9,)), clear=(1, 2)) == []
    return device


# ---- sound plans ----------------------------------------------------------------------------


def test_chunks_and_decode_steps_of_one_request_pass():
    device = after_six_tokens_of_a()
    assert device.step(row("a", 6, 8, (1, 2), (9,), samples=True)) == []
    assert device.step(row("a", 8, 9, (1, 2, 3), (9,), tokens=None), clear=(3,)) == []


def test_resume_by_copy_of_the_valid_slots_passes():
    device = after_six_tokens_of_a()
    resumed = row("b", 6, 8, (1, 3), (9,), (10,))
    copies = (PageCopy(2, 3, 2),)
    assert device.step(resumed, clear=(3,), copies=copies, frozen={1: 4, 2: 2, 9: 4}) == []


def test_producer_goes_on_behind_its_published_tail():
    device = after_six_tokens_of_a()
    frozen = {1: 4, 2: 2, 9: 4}
    assert device.step(row("a", 6, 8, (1, 2), (9,), (10,)), frozen=frozen) == []


def test_states_of_several_groups_do_not_stand_in_for_each_other():
    device = Device(num_state_pages=2)
    assert device.step(row("a", 0, 4, (1,), (8, 9)), clear=(1,)) == []
    assert device.step(row("a", 4, 6, (1, 2), (9, 8)), clear=(2,)) == ["state", "state"]


def test_an_exported_state_is_the_one_of_its_position():
    device = Device()
    export = StateExport(position=6, pages=(10,))
    assert device.step(row("a", 0, 7, (1, 2), (9,), export=export), clear=(1, 2)) == []
    assert device.model.check_entry(1, 10, "b", 6) is None
    assert device.model.check_entry(1, 10, "b", 5) is not None


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_the_step_after_drafts_starts_from_the_state_of_the_last_accepted_one(taken: int):
    device = after_six_tokens_of_a()
    drafts = row("a", 6, 9, (1, 2, 3), (9,), num_drafts=2, draft_states=((10,), (11,)))
    assert device.step(drafts, clear=(3,), accepted={"a": taken}) == []
    bundles = [(9,), (10,), (11,)]
    start = 7 + taken
    right = row("a", start, start + 1, (1, 2, 3), bundles[taken], (12,))
    assert device.step(right) == []


def test_the_state_after_a_rejected_draft_is_of_no_use():
    device = after_six_tokens_of_a()
    drafts = row("a", 6, 9, (1, 2, 3), (9,), num_drafts=2, draft_states=((10,), (11,)))
    device.step(drafts, clear=(3,), accepted={"a": 1})
    assert device.step(row("a", 9, 10, (1, 2, 3), (11,))) == ["prefix", "state"]


def test_without_pages_for_drafts_the_state_is_that_of_the_accepted_ones():
    device = after_six_tokens_of_a()
    drafts = row("a", 6, 9, (1, 2, 3), (9,), num_drafts=2)
    assert device.step(drafts, clear=(3,), accepted={"a": 1}) == []
    assert device.step(row("a", 8, 9, (1, 2, 3), (9,))) == []


# ---- faults ---------------------------------------------------------------------------------


def test_attention_page_that_was_not_cleared_holds_a_state():
    assert Device().step(row("a", 0, 6, (1, 2), (9,)), clear=(1,)) == ["foreign"]


def test_missing_copy_leaves_the_slots_below_the_hit_empty():
    device = after_six_tokens_of_a()
    assert device.step(row("b", 6, 8, (1, 3), (9,), (10,)), clear=(3,)) == ["prefix"]


def test_copy_of_too_few_slots():
    device = after_six_tokens_of_a()
    resumed = row("b", 6, 8, (1, 3), (9,), (10,))
    assert device.step(resumed, clear=(3,), copies=(PageCopy(2, 3, 1),)) == ["prefix"]


def test_copy_of_slots_that_nobody_has_written():
    device = Device()
    device.step(row("a", 0, 4, (1,), (9,)), clear=(1, 2))
    # Page 2 gets the tokens below the hit only in this step, after the copies.
    filler = row("a", 4, 6, (1, 2), (9,), (10,))
    resumed = row("b", 6, 8, (1, 3), (10,), (11,))
    rules = device.step(filler, resumed, clear=(3,), copies=(PageCopy(2, 3, 2),))
    assert sorted(rules) == ["prefix", "race", "state"]


def test_copies_are_gathered_before_they_are_written():
    device = after_six_tokens_of_a()
    chain = (PageCopy(2, 3, 2), PageCopy(3, 4, 2))
    assert "copies" in device.step(row("b", 6, 8, (1, 4), (9,), (10,)), clear=(3, 4), copies=chain)


def test_two_copies_into_one_page():
    device = after_six_tokens_of_a()
    twice = (PageCopy(1, 3, 2), PageCopy(2, 3, 2))
    assert device.step(row("b", 6, 8, (1, 3), (9,), (10,)), clear=(3,), copies=twice) == ["copies"]


def test_state_of_another_position():
    device = after_six_tokens_of_a()
    resumed = row("b", 4, 6, (1, 3), (9,), (10,))
    assert device.step(resumed, clear=(3,)) == ["state"]


def test_state_that_was_never_written():
    device = after_six_tokens_of_a()
    assert device.step(row("a", 6, 8, (1, 2), (10,))) == ["state"]


def test_clearing_a_page_after_it_was_written():
    device = after_six_tokens_of_a()
    rules = device.step(row("a", 6, 8, (1, 2), (9,)), clear=(2,))
    assert rules == ["shared", "prefix"]


def test_prefix_of_another_request():
    device = after_six_tokens_of_a()
    device.step(row("a", 6, 8, (1, 2), (9,)))
    assert device.step(row("b", 8, 9, (1, 2, 3), (9,)), clear=(3,)) == [
        "prefix",
        "state",
        "shared",
    ]


@pytest.mark.parametrize(
    ("changed", "rules"),
    [
        ({"frozen": {2: 3}}, ["published"]),
        ({"frozen": {9: 4}}, ["published"]),
        ({"frozen": {2: 2}}, []),
    ],
)
def test_published_bytes_do_not_change(changed: dict, rules: list[str]):
    device = after_six_tokens_of_a()
    assert device.step(row("a", 6, 8, (1, 2), (9,)), **changed) == rules


def test_page_that_another_request_still_needs():
    device = after_six_tokens_of_a()
    other = row("b", 0, 4, (2,), (10,))
    assert "shared" in device.step(other)
    device.model.release("a")
    assert "shared" not in device.step(other)


def test_state_page_that_is_read_and_written_in_one_step():
    device = after_six_tokens_of_a()
    device.model.release("a")
    reader = row("a", 6, 8, (1, 2), (9,), (10,))
    writer = row("b", 0, 4, (3,), (9,))
    assert device.step(reader, writer, clear=(3,)) == ["race"]


def test_null_page_is_never_written():
    rules = Device().step(row("a", 0, 4, (0,), (9,)), clear=(0,))
    assert rules == ["null", "null"]


def test_row_with_tokens_of_another_request():
    device = Device()
    wrong = row("a", 0, 4, (1,), (9,), tokens=(1, 2, 3, 4))
    assert device.step(wrong, clear=(1,)) == ["tokens"]


def test_token_buffer_of_another_row():
    device = Device()
    device.step(row("a", 0, 4, (1,), (9,), samples=True), clear=(1, 2))
    moved = row("a", 4, 5, (1, 2), (9,), tokens=None, slot=3)
    assert device.step(moved) == ["tokens"]


def test_row_that_contradicts_itself():
    device = Device()
    assert device.step(row("a", 0, 6, (1,), (9,)), clear=(1,)) == ["plan"]
    assert device.step(row("a", 0, 4, (1,), (9, 10)), clear=(1,)) == ["plan"]


def test_entry_of_a_page_with_other_tokens():
    device = after_six_tokens_of_a()
    assert device.model.check_entry(0, 2, "b", 6) is None
    assert device.model.check_entry(0, 2, "a", 7) is not None
    assert device.model.check_entry(0, 1, "a", 6) is not None
