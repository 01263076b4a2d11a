"""What each request of a trace should get and got, and the device that emits it by the script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from serving.plan import Output, RowPlan, StepPlan, StepResult
from serving.replay.trace import Add, num_tokens, token_ids


@dataclasses.dataclass(slots=True)
class Client:
    """One request.

    Attributes:
      tokens: prompt and output of the script.
      max_new: output tokens after which the request stops.
      received: output tokens so far.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    max_new: int
    received: list[int] = dataclasses.field(default_factory=list[int])
    is_done: bool = False
    is_aborted: bool = False

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and received output."""
        return (*self.tokens[: self.prompt_tokens], *self.received)

    def receive(self, output: Output) -> None:
        self.received += output.token_ids
        self.is_done = self.is_done or output.finish_reason is not None
        self.is_aborted = self.is_aborted or output.finish_reason == "abort"

    def problem(self) -> str | None:
        """What is wrong with the output of a request that has ended."""
        first = self.prompt_tokens
        want, got = self.tokens[first : first + self.max_new], tuple(self.received)
        if self.is_aborted:
            want = want[: len(got)]
        if not self.is_done or got == want:
            return None
        return f"got {len(got)} output tokens; expected {len(want)}, those that were emitted"


def make_client(op: Add) -> Client:
    tokens = token_ids(op.prompt) + token_ids(op.output)
    return Client(tokens, num_tokens(op.prompt), op.max_new)


def accepted_drafts(row: RowPlan, client: Client, accept: Mapping[str, int]) -> int:
    """Drafts of a row that the device takes: what the script says and has tokens for."""
    room = len(client.tokens) - (row.start + row.length - row.num_drafts) - 1
    return max(0, min(accept.get(row.request_id, 0), row.num_drafts, room))


def step_result(
    plan: StepPlan, clients: Mapping[str, Client], accepted: Mapping[str, int]
) -> StepResult:
    """What the device returns: the tokens of the script."""
    tokens: list[int] = []
    drafts: list[tuple[int, ...]] = []
    for row in plan.rows:
        known = clients[row.request_id].tokens
        first = row.start + row.length - row.num_drafts
        sampled = first + accepted[row.request_id]
        drafts.append(known[first:sampled])
        tokens.append(known[sampled] if row.samples and sampled < len(known) else 0)
    return StepResult(
        step_id=plan.step_id,
        tokens=np.array(tokens, np.int32),
        finite=np.ones(len(tokens), np.bool_),
        accepted=tuple(drafts) if any(row.num_drafts for row in plan.rows) else (),
    )
