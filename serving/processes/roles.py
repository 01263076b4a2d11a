"""A process of a group from its start to its end: it leads or it works, and never returns."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from k3jax.buckets import Bucket
from serving.processes.agreement import Facts, Hello
from serving.processes.channel import Channel, ChannelError, accept, connect
from serving.processes.children import CONTROL_KEY, choose_key, free_ports, start_children
from serving.processes.leader import Leader, open_door
from serving.processes.leaving import Exit
from serving.processes.messages import Kind, pack_json
from serving.processes.place import Place
from serving.processes.repeat import Model
from serving.processes.watch import WatchLimits
from serving.processes.worker import Worker, join_leader

_HELLO_S = 5.0

# Exit code and reason; the reason of a regular end is empty.
Outcome = tuple[int, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """How a group starts and when it ends.

    Attributes:
      start_s: time for all hosts to come.
      step_s: a step that takes longer is taken as a host that hangs.
    """

    start_s: float
    step_s: float


def choose_ports(place: Place) -> Place:
    """Choose the ports of a group on this machine, unless they are given."""
    if place.is_alone or place.coordinator_port:
        return place
    coordinator, control = free_ports(2)
    return dataclasses.replace(
        place, coordinator_port=coordinator, control_port=place.control_port or control
    )


def start_group(place: Place) -> tuple[Place, Exit, bytes]:
    """Start this machine's other processes.

    Returns:
      The place with its ports, the way out of this process, and the group's key.
    """
    key = choose_key(place, os.environ)
    place = choose_ports(place)
    children = start_children(place, dict(os.environ) | {CONTROL_KEY: key})
    return place, Exit(cleanup=children.finish), key.encode()


def lead(
    place: Place,
    facts: Facts,
    config: GroupConfig,
    exit: Exit,
    key: bytes,
    serve: Callable[[Leader], Outcome],
) -> NoReturn:
    """Be host 0.

    Args:
      serve: serves until the end, whatever it is.
    """
    hello = Hello(host_id=0, num_hosts=place.num_hosts, facts=facts)
    leader = Leader(place, key, hello, WatchLimits(step_s=config.step_s), exit)
    code, message = serve(leader)
    leader.stop(code, message and f"host 0: {message}")
    exit.now(code, message and f"serve.py: error: {message}")


def work(
    place: Place,
    facts: Facts,
    config: GroupConfig,
    exit: Exit,
    key: bytes,
    load: Callable[[Worker], tuple[Model, Sequence[Bucket]]],
    explain: Callable[[Exception], Outcome],
) -> NoReturn:
    """Be another host.

    Args:
      load: comes through the start, up to the barrier `ready`.
      explain: an error of `load`.
    """
    workers: list[Worker] = []

    def drain(number: int, frame: object) -> None:
        if not workers:
            exit.now(0, f"serve.py: host {place.host_id} stops")
        workers[0].drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    hello = Hello(host_id=place.host_id, num_hosts=place.num_hosts, facts=facts)
    try:
        worker = join_leader(place, key, hello, exit, timeout_s=config.start_s)
    except ChannelError as error:
        exit.now(1, f"serve.py: host {place.host_id}: {error}")
    workers.append(worker)

    def run() -> None:
        try:
            model, buckets = load(worker)
        except Exception as error:
            code, message = explain(error)
            worker.fail(message, code)
        print(f"worker ready host={place.host_id}", flush=True)
        worker.repeat(model, buckets)

    threading.Thread(target=run, name="work", daemon=True).start()
    while True:  # this thread is there for signals, and so that the others may hang
        signal.pause()


def report_failure(place: Place, config: GroupConfig, key: bytes, outcome: Outcome) -> None:
    """Tell why this process ends before it could join: host 0, or as host 0 all that come."""
    code, message = outcome
    if place.host_id == 0:
        _send_all_away(place, key, code, message, config.start_s)
        return
    body = pack_json({"code": code, "message": message, "host": place.host_id})
    try:
        channel: Channel = connect(place.address, place.control_port, key, timeout_s=config.start_s)
        channel.send(Kind.FAILED, body)
        channel.close()
    except ChannelError:
        pass  # host 0 misses this one, or is not there itself


def _send_all_away(place: Place, key: bytes, code: int, message: str, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    body = pack_json({"code": code, "message": f"host 0: {message}"})
    with (
        contextlib.suppress(OSError),  # nobody came in time, or the port is in use
        contextlib.closing(open_door(place)) as door,
    ):
        for _ in range(1, place.num_hosts):
            door.settimeout(max(0.001, end_s - time.monotonic()))
            with contextlib.suppress(ChannelError):
                channel = accept(door, key)
                channel.set_timeout(_HELLO_S)
                channel.receive()  # what is not read could cost the peer what is sent
                channel.send(Kind.STOP, body)
                channel.close()
