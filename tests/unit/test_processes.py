"""Several processes of one server: places, messages, agreement, and who counts as lost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.config import ConfigError
from serving.processes import channel as channels
from serving.processes import leader as leaders
from serving.processes.agreement import Hello, find_differences, gather_facts
from serving.processes.channel import Channel, ChannelError, KeyRefusedError, Message
from serving.processes.children import free_ports
from serving.processes.leader import HostLostError, Leader
from serving.processes.leaving import Exit
from serving.processes.messages import (
    Kind,
    pack_lists,
    pack_run,
    unpack_lists,
    unpack_run,
)
from serving.processes.place import (
    DEFAULT_PORT,
    Place,
    PlaceFlags,
    check_ranks,
    first_host,
    resolve,
)
from serving.processes.relay import start_relay
from serving.processes.repeat import SharedModel, make_call
from serving.processes.roles import GroupConfig, report_failure
from serving.processes.watch import HostWatch, WatchLimits
from serving.processes.worker import Worker, join_leader

DEADLINE_S = 10.0
LWS = {"LWS_LEADER_ADDRESS": "k3-0.k3", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
SLURM = {
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_NODELIST": "gpu[003-005,9],x1",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
}
FLAGS = PlaceFlags(coordinator="lead:7000", num_hosts=3, host_id=1)


# Places.


def test_nothing_given_is_one_process():
    place = resolve(PlaceFlags(), {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "HOME": "/x"})
    assert place.is_alone
    assert place == Place()


def test_flags_go_before_lws_and_that_before_slurm():
    assert resolve(FLAGS, LWS | SLURM).coordinator == "lead:7000"
    lws = resolve(PlaceFlags(), LWS | SLURM)
    assert (lws.address, lws.coordinator_port) == ("k3-0.k3", DEFAULT_PORT)
    assert (lws.num_hosts, lws.host_id, lws.control_port) == (4, 2, DEFAULT_PORT + 1)
    slurm = resolve(PlaceFlags(), SLURM)
    assert (slurm.address, slurm.num_hosts, slurm.host_id) == ("gpu003", 5, 0)
    assert slurm.coordinator_port == 61440 + 2 * 321
    assert slurm.control_port == slurm.coordinator_port + 1


def test_jobs_on_one_machine_have_ports_of_their_own():
    ports = [
        resolve(PlaceFlags(), SLURM | {"SLURM_JOB_ID": str(job)}).coordinator_port
        for job in range(1000, 1003)
    ]
    assert ports == [ports[0], ports[0] + 2, ports[0] + 4]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[001-004],gpu09", "gpu001"),
        ("gpu[3,7-9]", "gpu3"),
        ("rack1-[02-03]-ib,x", "rack1-02-ib"),
        ("login,gpu[1-2]", "login"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("flags", "environment", "got", "missing"),
    [
        ({"num_hosts": 2}, {}, "--num-hosts=2", "--coordinator, --host-id"),
        ({"coordinator": "a:1", "host_id": 0}, LWS, "--coordinator=a:1", "--num-hosts"),
        ({}, {"LWS_WORKER_INDEX": "1"}, "LWS_WORKER_INDEX=1", "LWS_LEADER_ADDRESS, LWS_GROUP_SIZE"),
        ({}, {"SLURM_STEP_NODELIST": "a"}, "SLURM_STEP_NODELIST=a", "SLURM_NTASKS, SLURM_PROCID"),
    ],
)
def test_half_described_group_is_refused_and_says_what_is_missing(
    flags: dict[str, Any], environment: dict[str, str], got: str, missing: str
):
    with pytest.raises(ConfigError) as error:
        resolve(PlaceFlags(**flags), environment)
    assert f"got {got}" in str(error.value)
    assert f"expected also {missing}" in str(error.value)


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (dataclasses.replace(FLAGS, host_id=3), {}, r"got 3; expected 0\.\.2"),
        (dataclasses.replace(FLAGS, coordinator="lead"), {}, "got 'lead'; expected HOST:PORT"),
        (dataclasses.replace(FLAGS, coordinator="lead:99999"), {}, "expected HOST:PORT"),
        (PlaceFlags(), LWS | {"LWS_GROUP_SIZE": "x"}, "LWS_GROUP_SIZE is not understood: got 'x'"),
    ],
)
def test_nonsense_is_refused(flags: PlaceFlags, environment: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(flags, environment)


def test_processes_of_a_machine_count_as_hosts_and_share_its_devices():
    parent = resolve(dataclasses.replace(FLAGS, processes=2), {})
    assert (parent.num_hosts, parent.host_id, parent.local_count) == (6, 2, 2)
    assert parent.local_devices(12) == (0, 1)
    flags = dataclasses.replace(FLAGS, num_hosts=6, host_id=3)
    child = resolve(flags, {"K3JAX_LOCAL_PROCESS": "1/2"})
    assert child.local_devices(12) == (2, 3)
    assert resolve(FLAGS, {}).local_devices(12) is None


def test_address_of_ipv6_has_brackets():
    place = resolve(dataclasses.replace(FLAGS, coordinator="[fd00::1]:7000"), {})
    assert place.address == "fd00::1"
    assert place.coordinator == "[fd00::1]:7000"


def test_mesh_divides_over_the_processes():
    check_ranks(Place(num_hosts=3), 6)
    with pytest.raises(ConfigError, match="got 8 devices for 3 hosts; expected a multiple of 3"):
        check_ranks(Place(num_hosts=3), 8)


# Messages.


def test_calls_survive_their_way_as_bytes():
    packed = np.arange(-3, 11, dtype=np.int32).reshape(2, 7)
    index, array = unpack_run(pack_run(5, packed))
    assert index == 5
    np.testing.assert_array_equal(array, packed)
    assert array.dtype == np.int32
    pages = [[7, 8, 9], [], [1]]
    assert unpack_lists(pack_lists(pages, 1), 1) == pages
    copies = [[], [(1, 2, 3), (4, 5, 6)]]
    assert unpack_lists(pack_lists(copies, 3), 3) == copies


class FakeModel:
    """Notes the calls that it gets."""

    program = "program"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def clear(self, pages: Any) -> None:
        self.calls.append(("clear", pages))

    def copy(self, copies: Any) -> None:
        self.calls.append(("copy", copies))

    def control(self, call: np.ndarray) -> None:
        self.calls.append(("control", call.tolist()))

    def run(self, bucket: Bucket, packed: np.ndarray) -> str:
        self.calls.append(("run", bucket, packed.tolist()))
        return "result"


class FakeLeader:
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send_call(self, kind: Kind, body: bytes) -> None:
        self.sent.append(Message(kind, len(self.sent) + 1, body))


def test_kf_h02_every_host_makes_the_calls_of_the_leader():
    buckets = [Bucket("decode", 1, 1, 1), Bucket("prefill", 8, 2, 1)]
    own, other, leader = FakeModel(), FakeModel(), FakeLeader()
    shared = SharedModel(own, leader, buckets)  # pyright: ignore
    shared.clear([[], []])  # nothing to do: nothing is sent
    shared.clear([[3, 4], []])
    shared.copy([[], [(1, 2, 3)]])
    shared.control(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert shared.run(buckets[1], np.ones((2, 3), np.int32)) == "result"
    results = [make_call(other, buckets, message) for message in leader.sent]
    assert len(own.calls) == 4
    assert other.calls == own.calls
    assert results == [None, None, None, "result"]


# Connections.


def connected(key: bytes = b"key", other_key: bytes = b"key") -> tuple[Channel, Channel]:
    """Both ends of a greeted connection."""
    with channels.listen("127.0.0.1", 0) as door:
        ends: list[Channel] = []
        port = door.getsockname()[1]

        def call() -> None:
            with contextlib.suppress(ChannelError):
                ends.append(channels.connect("127.0.0.1", port, other_key, timeout_s=DEADLINE_S))

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        try:
            own = channels.accept(door, key)
        finally:
            caller.join(DEADLINE_S)
        return own, ends[0]


def test_messages_come_in_order_and_whole():
    own, other = connected()
    bodies = [b"", b"x" * 300_000, b"y"]
    sender = threading.Thread(
        target=lambda: [own.send(Kind.RUN, body, sequence=i) for i, body in enumerate(bodies)]
    )
    sender.start()
    got = [other.receive() for _ in bodies]
    sender.join(DEADLINE_S)
    assert got == [Message(Kind.RUN, i, body) for i, body in enumerate(bodies)]
    own.close()
    with pytest.raises(ChannelError, match="its connection closed"):
        other.receive()
    other.close()


def test_other_key_is_refused():
    with pytest.raises(KeyRefusedError, match="control key differs"):
        connected(other_key=b"another")


def test_stranger_is_refused_and_a_silent_peer_costs_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(channels, "_GREETING_TIMEOUT_S", 0.1)
    with channels.listen("127.0.0.1", 0) as door:
        for noise in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b""):
            with socket.create_connection(door.getsockname()) as stranger:
                stranger.sendall(noise)
                with pytest.raises(ChannelError):
                    channels.accept(door, b"key")


def test_small_message_is_dropped_rather_than_waited_for():
    own, other = connected()
    own.set_timeout(0.2)
    with pytest.raises(ChannelError):
        own.send(Kind.RUN, b"x" * 50_000_000)  # nobody reads: the buffers are full
    begin = time.monotonic()
    own.offer(Kind.BEAT)
    assert time.monotonic() - begin < 0.1
    own.close()
    other.close()


# Agreement.


def test_difference_names_what_it_is_and_who_has_it(tmp_path: Any):
    (tmp_path / "config.json").write_text("{}")
    facts = gather_facts({"mesh": "tp2", "max_rows": 8}, tmp_path)
    own = Hello(host_id=0, num_hosts=3, facts=facts)
    same = Hello(host_id=1, num_hosts=3, facts=dict(facts))
    assert find_differences(own, [same]) == []
    (tmp_path / "config.json").write_text('{"a": 1}')
    other = Hello(
        host_id=2, num_hosts=2, facts=gather_facts({"mesh": "tp4", "max_rows": 8}, tmp_path)
    )
    number, mesh, config = find_differences(own, [other, same])
    assert number == "number of hosts differs: got 2 from host 2; expected 3, as host 0 has"
    assert mesh == "--mesh differs: got tp4 from host 2; expected tp2, as host 0 has"
    assert config.startswith("config.json differs: got sha256 ")


# Who is lost.

LIMITS = WatchLimits(silence_s=4, start_silence_s=20, take_s=5, step_s=30)


def test_silent_host_is_lost_sooner_once_it_serves():
    watch = HostWatch(LIMITS, 0.0)
    watch.heard(2.0)
    assert watch.verdict(21.9) is None
    assert watch.verdict(22.5) == "is silent for 20.5 s"
    watch.start_serving()
    assert watch.verdict(5.9) is None
    assert watch.verdict(6.5) == "is silent for 4.5 s"


def test_host_that_lives_but_takes_no_call_is_lost():
    watch = HostWatch(LIMITS, 0.0)
    watch.start_serving()
    watch.sent(1, 10.0, is_step=False)
    watch.heard(14.9)
    assert watch.verdict(14.9) is None
    watch.heard(15.5)
    assert watch.verdict(15.5) == "hangs: it lives, but did not take call 1 for 5.5 s"
    watch.acknowledged(1, 0, 15.6)
    assert watch.verdict(15.7) is None


def test_host_that_is_busy_with_a_long_step_may_take_the_next_call_late():
    watch = HostWatch(LIMITS, 0.0)
    watch.start_serving()
    watch.sent(1, 0.0, is_step=True)
    watch.sent(2, 0.1, is_step=True)
    watch.acknowledged(1, 0, 0.5)
    watch.heard(20.0)
    assert watch.verdict(20.0) is None
    watch.acknowledged(1, 1, 20.0)  # from here on it has nothing else to do
    watch.heard(24.0)
    assert watch.verdict(24.0) is None
    watch.heard(26.0)
    assert watch.verdict(26.0) == "hangs: it lives, but did not take call 2 for 6.0 s"


def test_kf_k10_step_that_does_not_end_is_a_host_that_hangs():
    watch = HostWatch(LIMITS, 0.0)
    watch.start_serving()
    watch.sent(1, 0.0, is_step=True)
    watch.sent(2, 1.0, is_step=True)
    watch.acknowledged(2, 1, 29.0)
    watch.heard(58.0)
    assert watch.verdict(58.0) is None  # step 2 could only begin at 29 s
    watch.heard(60.0)
    assert watch.verdict(60.0) == "hangs: step 2 did not finish within 31.0 s"


# Leader and worker in one process: the sockets are real, the exits are not.


class Ends:
    """Exits that did not happen."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()
        self.workers: list[Worker] = []

    def exit(self) -> Exit:
        def leave(code: int) -> None:
            if self.happened.is_set():
                return
            self.codes.append(code)
            for worker in self.workers:  # the end of a process closes its connection
                worker._channel.close()
            self.happened.set()
            threading.Event().wait()

        return Exit(leave=leave)


@dataclasses.dataclass
class Group:
    """A leader, and ways to start workers."""

    port: int
    leader: Leader
    leader_ends: Ends
    losses: list[HostLostError]
    drains: threading.Event
    ends: list[Ends] = dataclasses.field(default_factory=list)

    def close(self) -> None:
        self.leader._is_stopping = True
        for host in self.leader._hosts.values():
            host.channel.close()
        for worker in itertools.chain.from_iterable(ends.workers for ends in self.ends):
            worker._channel.close()

    def place(self, host_id: int, num_hosts: int = 2) -> Place:
        return Place(control_port=self.port, num_hosts=num_hosts, host_id=host_id)

    def join(
        self, host_id: int = 1, facts: dict[str, str] | None = None
    ) -> tuple[list[Worker], Ends]:
        """Join in a thread; the list holds the worker once it is welcome."""
        ends = Ends()
        self.ends.append(ends)
        hello = Hello(host_id=host_id, num_hosts=2, facts=facts or {"--mesh": "tp2"})

        def run() -> None:
            place = self.place(host_id)
            try:
                ends.workers.append(join_leader(place, b"key", hello, ends.exit(), timeout_s=5.0))
            except ChannelError:
                ends.happened.set()

        threading.Thread(target=run, daemon=True).start()
        return ends.workers, ends


@pytest.fixture
def group() -> Iterator[Group]:
    (port,) = free_ports(1)
    ends, losses, drains = Ends(), list[HostLostError](), threading.Event()
    hello = Hello(host_id=0, num_hosts=2, facts={"--mesh": "tp2"})
    place = Place(control_port=port, num_hosts=2)
    limits = WatchLimits(silence_s=1.0, start_silence_s=1.0, take_s=1.0, step_s=2.0)
    leader = Leader(place, b"key", hello, limits, ends.exit())
    leader.attach(on_lost=losses.append, on_drain=drains.set)
    group = Group(port, leader, ends, losses, drains)
    yield group
    group.close()


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.01)


def test_group_comes_through_the_start_drains_and_ends(group: Group, capfd: Any):
    workers, ends = group.join()
    group.leader.gather(DEADLINE_S)
    until(lambda: workers)
    least = list[int]()
    threading.Thread(target=lambda: least.append(workers[0].barrier("loaded", 70))).start()
    assert group.leader.barrier("loaded", 90) == 70
    until(lambda: least == [70])
    workers[0].drain()
    assert group.drains.wait(DEADLINE_S)
    group.leader.stop()
    assert ends.happened.wait(DEADLINE_S)
    assert ends.codes == [0]
    assert group.losses == []
    assert capfd.readouterr().err.splitlines()[-1] == "serve.py: host 1 stops"


def test_kf_h03_difference_ends_every_process_with_what_differs(group: Group, capfd: Any):
    _, ends = group.join(facts={"--mesh": "tp4"})
    with pytest.raises(ConfigError) as error:
        group.leader.gather(DEADLINE_S)
    assert str(error.value) == "--mesh differs: got tp4 from host 1; expected tp2, as host 0 has"
    group.leader.stop(2, "host 0: --mesh differs")
    assert ends.happened.wait(DEADLINE_S)
    assert ends.codes == [2]
    assert "serve.py: host 1: host 0: --mesh differs" in capfd.readouterr().err


def test_host_that_never_comes_is_named(group: Group):
    with pytest.raises(HostLostError, match=r"got none of host 1 within 0\.3 s"):
        group.leader.gather(0.3)


def test_worker_without_leader_gives_up_and_names_the_address(group: Group):
    hello = Hello(host_id=1, num_hosts=2, facts={})
    with pytest.raises(ChannelError, match=f"host 0 at 127.0.0.1:{group.port} is lost: no answer"):
        join_leader(group.place(1), b"key", hello, Ends().exit(), timeout_s=0.3)


def test_kf_h03_error_of_one_host_while_starting_is_the_error_of_all(group: Group, capfd: Any):
    workers, ends = group.join()
    group.leader.gather(DEADLINE_S)
    until(lambda: workers)
    threading.Thread(target=lambda: workers[0].fail("file is unreadable", 2), daemon=True).start()
    with pytest.raises(HostLostError, match="host 1: file is unreadable") as error:
        group.leader.barrier("loaded")
    assert error.value.code == 2
    assert ends.happened.wait(DEADLINE_S)
    assert ends.codes == [2]
    assert "serve.py: host 1: file is unreadable" in capfd.readouterr().err


def test_kf_h03_host_0_that_cannot_start_says_why_to_all_that_come(group: Group, capfd: Any):
    _, ends = group.join()
    config = GroupConfig(start_s=DEADLINE_S, step_s=1.0)
    report_failure(group.place(0), config, b"key", (2, "model is missing"))
    assert ends.happened.wait(DEADLINE_S)
    assert ends.codes == [2]
    assert "serve.py: host 1: host 0: model is missing" in capfd.readouterr().err


@pytest.mark.parametrize("sequence", [0, 2])
def test_call_out_of_order_ends_the_group(group: Group, sequence: int):
    workers, _ = group.join()
    group.leader.gather(DEADLINE_S)
    until(lambda: workers)
    threading.Thread(target=lambda: workers[0].repeat(FakeModel(), []), daemon=True).start()
    group.leader._sequence = sequence - 1
    group.leader.send_call(Kind.CLEAR, pack_lists([[1]], 1))
    until(lambda: group.losses)
    assert str(group.losses[0]) == (
        f"host 1: out of step: got call {sequence} of kind 5; expected call 1"
    )


def test_kf_h01_end_of_a_connection_is_noticed_at_once(
    group: Group, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leaders, "_EXIT_S", 0.2)
    workers, _ = group.join()
    group.leader.gather(DEADLINE_S)
    until(lambda: workers)
    begin = time.monotonic()
    workers[0]._channel.close()
    until(lambda: group.losses)
    assert str(group.losses[0]) == "host 1 is lost: its connection closed"
    assert time.monotonic() - begin < 0.5
    assert group.leader_ends.happened.wait(DEADLINE_S)  # even if the server does nothing
    assert group.leader_ends.codes == [1]


def test_kf_h01_silent_host_is_lost(group: Group):
    hello = Hello(host_id=1, num_hosts=2, facts={"--mesh": "tp2"})
    silent = list[Channel]()

    def join() -> None:
        silent.append(channels.connect("127.0.0.1", group.port, b"key", timeout_s=DEADLINE_S))
        silent[0].send(Kind.HELLO, hello.pack())

    threading.Thread(target=join, daemon=True).start()
    group.leader.gather(DEADLINE_S)
    until(lambda: group.losses)
    assert str(group.losses[0]).startswith("host 1 is lost: it is silent for 1.")
    silent[0].close()


def test_kf_h01_error_of_a_step_counts_only_if_no_host_is_lost(group: Group):
    workers, _ = group.join()
    group.leader.gather(DEADLINE_S)
    until(lambda: workers)
    outcomes = list[str]()

    def fail_a_step() -> None:
        try:
            with group.leader.device_call():
                raise RuntimeError("the collective failed")
        except RuntimeError as error:
            outcomes.append(str(error))

    fail_a_step()
    assert outcomes == ["the collective failed"]
    caller = threading.Thread(target=fail_a_step, daemon=True)
    caller.start()
    workers[0]._channel.close()
    until(lambda: group.losses)
    caller.join(0.2)
    assert caller.is_alive()  # until the process ends
    assert len(outcomes) == 1


def test_kf_h01_relay_carries_both_ways_and_hides_the_end_of_the_service():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = start_relay(*door.getsockname())
        with socket.create_connection(("127.0.0.1", port)) as client:
            service, _ = door.accept()
            client.sendall(b"question")
            assert service.recv(100) == b"question"
            service.sendall(b"answer")
            assert client.recv(100) == b"answer"
            service.close()
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(100)


def test_relay_sends_clients_away_that_come_before_the_service():
    (port,) = free_ports(1)
    with socket.create_connection(("127.0.0.1", start_relay("127.0.0.1", port))) as client:
        assert client.recv(100) == b""


def test_relay_ends_the_connection_of_a_client_that_leaves():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = start_relay(*door.getsockname())
        with socket.create_connection(("127.0.0.1", port)):
            service, _ = door.accept()
        with service:
            assert service.recv(100) == b""
