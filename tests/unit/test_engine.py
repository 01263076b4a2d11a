"""The engine's thread: what its clients see, and what is left when they are gone."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from serving import request
from serving.engine import Engine
from serving.page_table import empty_table
from serving.plan import Output
from serving.request import Request, RequestError
from tests.fakes import (
    EOS,
    FakeClock,
    FakeDevices,
    FakeExecutor,
    fake_geometry,
    fake_limits,
    fake_request,
    solo_tokens,
)

WAIT_S = 30  # far beyond what anything here takes; a test that waits this long has failed
NUM_PAGES = 40


class Client:
    """Collects one request's outputs."""

    def __init__(self, request: Request):
        self.request = request
        self.outputs: list[Output] = []
        self._ended = threading.Event()
        self._first = threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self._first.set()
        if output.finish_reason is not None:
            self._ended.set()

    def wait_first(self) -> None:
        assert self._first.wait(WAIT_S), "no output came"

    def wait(self) -> Output:
        """The last output."""
        assert self._ended.wait(WAIT_S), "the request did not end"
        return self.outputs[-1]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for output in self.outputs for token in output.token_ids)


class Server:
    """An engine on a fake device, with what a test wants to look at."""

    def __init__(
        self,
        *,
        scripted: dict[tuple[str, int], int] | None = None,
        max_waiting: int = 100,
        num_replicas: int = 1,
    ):
        geometry = fake_geometry()
        self.devices = FakeDevices(
            *(
                FakeExecutor(geometry, num_pages=NUM_PAGES, scripted=scripted)
                for _ in range(num_replicas)
            )
        )
        self.executor = self.devices.replicas[0]
        self.clock = FakeClock()
        self.failures: list[BaseException] = []
        self.engine = Engine(
            self.devices,
            fake_limits(geometry, num_pages=NUM_PAGES, max_waiting=max_waiting),
            [empty_table(geometry, NUM_PAGES)] * num_replicas,
            on_failure=self.failures.append,
            clock=self.clock,
        )

    def submit(self, request: Request) -> Client:
        client = Client(request)
        self.engine.submit(request, client).result(WAIT_S)
        return client

    def submit_together(self, requests: Iterable[Request]) -> list[Client]:
        """Requests that the engine sees while none of them has got a token."""
        self.executor.gate.clear()
        clients = [Client(request) for request in requests]
        futures = [self.engine.submit(client.request, client) for client in clients]
        self.executor.gate.set()
        for future in futures:
            future.result(WAIT_S)
        return clients

    def settle(self) -> None:
        """Wait until every event posted so far is taken and every step so far is collected."""
        self.submit(fake_request("probe", (1,), max_tokens=1)).wait()


StartServer = Callable[[Server], Server]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers, and ends their threads with the test."""
    servers: list[Server] = []

    def start(server: Server) -> Server:
        servers.append(server)
        server.engine.start()
        return server

    yield start
    for server in servers:
        server.executor.gate.set()
        server.engine.stop()
        assert server.engine.join(WAIT_S), "the engine's thread did not end"


@pytest.fixture
def server(start_server: StartServer) -> Server:
    return start_server(Server())


def shut_gate(server: Server, request: Request) -> Client:
    """A request whose first step is dispatched, and whose result is held back."""
    server.executor.gate.clear()
    return server.submit(request)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        threading.Event().wait(0.001)


def long_request(request_id: str = "a") -> Request:
    return fake_request(request_id, (1, 2, 3), max_tokens=60)


# ---- serving --------------------------------------------------------------------------------


def test_streams_equal_their_solo_runs(server: Server):
    requests = [
        fake_request(name, range(2 + i), max_tokens=8, seed=i) for i, name in enumerate("abcdefgh")
    ]
    clients = [server.submit(request) for request in requests]
    assert [client.wait().finish_reason for client in clients] == ["length"] * 8
    assert [client.tokens for client in clients] == [solo_tokens(request) for request in requests]


def test_the_next_step_is_dispatched_before_the_last_one_is_collected(server: Server):
    client = shut_gate(server, fake_request("a", max_tokens=4))
    wait_until(lambda: len(server.executor.plans) == 2)
    assert server.executor.num_uncollected == 2
    server.executor.gate.set()
    client.wait()


def test_outputs_come_only_after_acceptance(server: Server):
    accepted: list[bool] = []
    future: Future[None] = Future()
    client = Client(fake_request("a"))

    def on_output(output: Output) -> None:
        accepted.append(future.done())
        client(output)

    server.executor.gate.clear()
    future = server.engine.submit(client.request, on_output)
    future.result(WAIT_S)
    server.executor.gate.set()
    client.wait()
    assert accepted == [True] * 4


def test_counts_are_true_when_the_last_output_is_seen(server: Server):
    request = fake_request("a", (1, 2, 3), max_tokens=5)
    server.submit(request).wait()
    counts = server.engine.counts()
    assert (counts.running, counts.waiting) == (0, 0)
    assert counts.free_pages == counts.total_pages == NUM_PAGES - 1
    assert counts.prompt_tokens == 3
    assert counts.generated_tokens == 5
    assert counts.steps == 5
    assert counts.preemptions == 0


def test_counts_show_running_requests_and_their_pages(server: Server):
    shut_gate(server, long_request())
    wait_until(lambda: server.engine.counts().running == 1)
    counts = server.engine.counts()
    assert counts.free_pages == NUM_PAGES - 1 - 4


def test_an_idle_engine_sleeps_with_no_step_outstanding(server: Server):
    server.submit(fake_request("a")).wait()
    server.settle()
    steps = len(server.executor.plans)
    cpu_s = time.process_time()
    threading.Event().wait(0.2)
    assert len(server.executor.plans) == steps
    assert server.executor.num_uncollected == 0
    assert time.process_time() - cpu_s < 0.05


def test_the_surplus_step_after_a_stop_is_collected(start_server: StartServer):
    server = start_server(Server(scripted={("a", 4): EOS}))
    client = server.submit(long_request())
    assert client.wait().finish_reason == "stop"
    assert client.tokens[-1] == EOS
    server.settle()
    assert server.executor.num_uncollected == 0


def test_kf_k10_step_age_grows_while_a_step_does_not_end(server: Server):
    assert server.engine.step_age_s() == 0.0
    client = shut_gate(server, fake_request("a"))
    wait_until(lambda: len(server.executor.plans) == 2)
    server.clock.now_s += 7.5
    assert server.engine.step_age_s() == 7.5
    server.executor.gate.set()
    client.wait()
    server.settle()
    assert server.engine.step_age_s() == 0.0


def test_two_replicas_serve_as_one(start_server: StartServer):
    server = start_server(Server(num_replicas=2))
    requests = [
        fake_request(name, range(2 + i), max_tokens=8, seed=i) for i, name in enumerate("abcdefgh")
    ]
    clients = server.submit_together(requests)
    assert [client.wait().finish_reason for client in clients] == ["length"] * 8
    assert [client.tokens for client in clients] == [solo_tokens(request) for request in requests]
    server.settle()
    counts = server.engine.counts()
    assert server.engine.num_replicas == len(counts.replicas) == 2
    assert counts.generated_tokens == 8 * 8 + 1
    assert sum(part.generated_tokens for part in counts.replicas) == counts.generated_tokens
    assert min(part.generated_tokens for part in counts.replicas) >= 24
    assert [part.total_pages for part in counts.replicas] == [NUM_PAGES - 1] * 2
    assert counts.free_pages == counts.total_pages == 2 * (NUM_PAGES - 1)
    computed = [sum(row.length for plan in replica.plans for row in plan.rows)
                for replica in server.devices.replicas]  # fmt: skip
    assert list(counts.expert_load) == computed
    assert counts.steps == len(server.devices.steps)


def test_counts_of_replicas_show_what_each_has(start_server: StartServer):
    server = Server(num_replicas=2)
    server.executor.gate.clear()
    for name in "abc":
        server.engine.submit(long_request(name), Client(long_request(name)))
    start_server(server)
    wait_until(lambda: server.engine.counts().running == 3)
    parts = server.engine.counts().replicas
    assert [(part.running, part.pending_prompt_tokens) for part in parts] == [(2, 6), (1, 3)]
    assert [NUM_PAGES - 1 - part.free_pages for part in parts] == [8, 4]


# ---- refusing -------------------------------------------------------------------------------


def test_a_bad_request_is_refused_without_reaching_the_device(server: Server):
    client = Client(fake_request("a", ()))
    refused = server.engine.submit(client.request, client).exception(WAIT_S)
    assert isinstance(refused, RequestError)
    assert refused.status == "INVALID_ARGUMENT"
    assert client.outputs == server.executor.plans == []


def test_a_live_id_is_refused_and_the_first_stream_goes_on(server: Server):
    first = shut_gate(server, fake_request("a", max_tokens=4))
    second = Client(fake_request("a", (9,)))
    refused = server.engine.submit(second.request, second)
    server.executor.gate.set()
    error = refused.exception(WAIT_S)
    assert isinstance(error, RequestError)
    assert error.status == "ALREADY_EXISTS"
    first.wait()
    assert first.tokens == solo_tokens(first.request)


def test_a_full_queue_refuses_at_once(start_server: StartServer):
    server = start_server(Server(max_waiting=1))
    server.executor.gate.clear()
    futures = [
        server.engine.submit(request, Client(request))
        for request in (long_request(name) for name in "abcdefgh")
    ]
    server.executor.gate.set()
    errors = [future.exception(WAIT_S) for future in futures]
    refused = [error for error in errors if isinstance(error, RequestError)]
    assert refused
    assert {error.status for error in refused} == {"RESOURCE_EXHAUSTED"}


def test_a_request_that_is_withdrawn_before_acceptance_never_runs(server: Server):
    first = shut_gate(server, long_request("a"))
    wait_until(lambda: len(server.executor.plans) == 2)  # the engine now waits for the device
    client = Client(fake_request("b"))
    assert server.engine.submit(client.request, client).cancel()
    server.executor.gate.set()
    first.wait()
    assert client.outputs == []
    assert {row.request_id for plan in server.executor.plans for row in plan.rows} == {"a"}


# ---- leaving --------------------------------------------------------------------------------


def test_an_abort_frees_everything_and_is_idempotent(server: Server):
    client = shut_gate(server, long_request())
    server.engine.abort(["a", "nobody"])
    server.engine.abort(["a"])
    server.executor.gate.set()
    assert client.wait().finish_reason == "abort"
    server.settle()
    counts = server.engine.counts()
    assert counts.free_pages == counts.total_pages
    assert sum(output.finish_reason is not None for output in client.outputs) == 1


def test_a_paused_request_stops_and_goes_on_where_it_was(server: Server):
    paused = shut_gate(server, long_request("a"))
    server.engine.pause("a")
    server.engine.pause("nobody")
    server.executor.gate.set()
    other = server.submit(fake_request("b", max_tokens=30))
    other.wait()
    assert len(paused.outputs) < 10
    server.engine.resume("a")
    assert paused.wait().finish_reason == "length"
    assert paused.tokens == solo_tokens(paused.request)


def test_a_pause_does_not_outlive_its_request(server: Server):
    first = shut_gate(server, long_request())
    server.engine.pause("a")
    server.engine.abort(["a"])
    server.executor.gate.set()
    first.wait()
    assert server.submit(fake_request("a")).wait().finish_reason == "length"


def test_a_callback_that_raises_costs_only_its_own_request(
    server: Server, caplog: pytest.LogCaptureFixture
):
    def broken(output: Output) -> None:
        raise RuntimeError("the stream is gone")

    server.engine.submit(long_request("a"), broken).result(WAIT_S)
    good = server.submit(fake_request("b"))
    good.wait()
    server.settle()
    assert [record.message for record in caplog.records] == ["output_callback_failed"]
    assert good.tokens == solo_tokens(good.request)
    assert server.engine.health().status == "serving"
    assert server.engine.counts().free_pages == NUM_PAGES - 1


# ---- ending ---------------------------------------------------------------------------------


def test_drain_refuses_new_requests_and_lets_open_ones_end(server: Server):
    client = shut_gate(server, fake_request("a", max_tokens=6))
    drained = server.engine.drain()
    late = Client(fake_request("b"))
    refused = server.engine.submit(late.request, late)
    server.executor.gate.set()
    error = refused.exception(WAIT_S)
    assert isinstance(error, RequestError)
    assert error.status == "UNAVAILABLE"
    drained.result(WAIT_S)
    assert server.engine.health().status == "draining"
    assert client.wait().finish_reason == "length"
    assert client.tokens == solo_tokens(client.request)


def test_draining_an_idle_engine_is_done_at_once(server: Server):
    server.engine.drain().result(WAIT_S)


def test_stop_gives_every_open_request_a_status(server: Server):
    server.executor.gate.clear()
    clients = [Client(long_request(name)) for name in "abcdef"]
    futures = [server.engine.submit(client.request, client) for client in clients]
    server.engine.stop()
    server.executor.gate.set()
    for future in futures:
        future.result(WAIT_S)
    for client in clients:
        last = client.wait()
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error.status == "UNAVAILABLE"
    assert server.engine.join(WAIT_S)
    assert server.engine.health().status == "stopped"
    assert server.executor.num_uncollected == 0
    assert server.engine.counts().free_pages == NUM_PAGES - 1


def test_a_stopped_engine_answers_everything(server: Server):
    server.engine.stop()
    assert server.engine.join(WAIT_S)
    error = server.engine.submit(fake_request("a"), Client(fake_request("a"))).exception(WAIT_S)
    assert isinstance(error, RequestError)
    assert error.status == "UNAVAILABLE"
    server.engine.drain().result(WAIT_S)
    server.engine.abort(["a"])
    server.engine.stop()


def test_a_failing_device_ends_every_stream_with_internal(
    server: Server, caplog: pytest.LogCaptureFixture
):
    server.executor.fail_at_step = 3
    clients = server.submit_together(long_request(name) for name in "abcdef")
    for client in clients:
        last = client.wait()
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error.status == "INTERNAL"
        assert "the fake device failed" in last.error.message
    assert server.engine.join(WAIT_S)
    assert [record.message for record in caplog.records] == ["engine_failed"]
    health = server.engine.health()
    assert health.status == "failed"
    assert "RuntimeError: the fake device failed" in health.message
    assert [type(failure) for failure in server.failures] == [RuntimeError]
    late = server.engine.submit(fake_request("z"), Client(fake_request("z"))).exception(WAIT_S)
    assert isinstance(late, RequestError)
    assert late.status == "UNAVAILABLE"


def test_health_is_starting_until_the_thread_runs(start_server: StartServer):
    server = Server()
    assert server.engine.health().status == "starting"
    start_server(server)
    server.settle()
    assert server.engine.health().status == "serving"


class Grammar:
    """Masks that tell how many tokens it has seen; none after `most`."""

    def __init__(self, most: int = 99) -> None:
        self.seen: list[int] = []
        self.most = most

    def mask(self) -> np.ndarray:
        if len(self.seen) >= self.most:
            raise RequestError("INVALID_ARGUMENT", "regex cannot be followed")
        return np.array([len(self.seen)], np.int32)

    def accept(self, token_ids: Iterable[int]) -> None:
        self.seen += token_ids


def test_each_step_of_a_row_with_a_grammar_has_the_mask_of_all_tokens_before_it(
    server: Server,
) -> None:
    asked = fake_request("g", max_tokens=5)
    sampling = dataclasses.replace(asked.sampling, grammar=request.Grammar("regex", "a"))
    asked = dataclasses.replace(asked, sampling=sampling)
    client, grammar = Client(asked), Grammar()
    plain = server.submit(fake_request("plain", max_tokens=9))
    server.engine.submit(asked, client, grammar=grammar).result(WAIT_S)
    client.wait()
    plain.wait()
    assert plain.tokens == solo_tokens(plain.request)
    assert client.tokens == tuple(grammar.seen) == solo_tokens(asked)
    masks = [mask.words.tolist() for plan in server.executor.plans for mask in plan.masks]
    assert masks == [[0], [1], [2], [3], [4]]


def test_a_grammar_that_cannot_be_followed_any_further_ends_its_request_alone(
    server: Server,
) -> None:
    plain, asked = fake_request("plain", max_tokens=9), fake_request("g", max_tokens=5)
    sampling = dataclasses.replace(asked.sampling, grammar=request.Grammar("regex", "a"))
    asked = dataclasses.replace(asked, sampling=sampling)
    neighbour, client = server.submit(plain), Client(asked)
    server.engine.submit(asked, client, grammar=Grammar(most=3)).result(WAIT_S)
    last = client.wait()
    assert client.tokens == solo_tokens(asked)[:3]
    assert (last.finish_reason, last.completion_tokens) == ("error", 3)
    assert last.error is not None
    assert last.error.status == "INVALID_ARGUMENT"
    neighbour.wait()
    assert neighbour.tokens == solo_tokens(plain)
    server.settle()
    counts = server.engine.counts()
    assert counts.free_pages == counts.total_pages
