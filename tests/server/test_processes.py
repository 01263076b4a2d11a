"""A server of several processes: the same tokens as one process, and an end that nobody misses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from serving.processes.children import free_ports
from serving.processes.leader import HostLostError
from serving.rpc.protocol import Stub
from tests import tiny
from tests.fakes import fake_geometry
from tests.server.groups import (
    CASES,
    END_S,
    ROOT,
    START_S,
    Case,
    Group,
    Stream,
    model_arguments,
    play,
    until,
    write_model,
)
from tests.server.harness import SlowExecutor, fake_load, request, serving, status_of

MODEL = tiny.DATA / "k3-tiny"
ROUNDS = int(os.environ.get("K3JAX_TEST_ROUNDS", "10"))


def test_kf_h01_two_processes_answer_like_one_until_one_is_killed(tmp_path: Path):
    want = np.load(MODEL / "expected.npz")
    with Group(tmp_path, 2, *model_arguments(MODEL, tmp_path / "cache", "tp2")) as group:
        group.wait_ready()
        with grpc.insecure_channel(group.address) as channel:
            for name in ("len7", "len33"):
                ids = want[f"greedy.{name}.ids"].tolist()
                stream = Stream(Stub(channel), want[f"{name}.tokens"].tolist(), len(ids))
                stream.join(60.0)
                assert stream.token_ids == ids
            # Its controls are set on the devices of all processes.
            stream = Stream(
                Stub(channel), [3, 4], 6, logit_bias={5: 100.0, 9: 99.0}, presence_penalty=2.0,
                logprobs=2,
            )  # fmt: skip
            stream.join(60.0)
            assert set(stream.token_ids) == {5, 9}
        play(group, Case(signal.SIGKILL, 1, "decode"))


async def test_kf_h01_lost_host_ends_streams_and_health_though_the_engine_hangs():
    executor = SlowExecutor(fake_geometry(page_tokens=64))
    load = fake_load(executor, page_tokens=64, max_context_tokens=3000)
    async with serving(load) as harness:
        call = harness.stub.Generate(request(max_tokens=2900))
        await harness.until(lambda: harness.counts().replicas[0].generated_tokens > 0)
        executor.gate.clear()
        harness.server.fail(HostLostError("host 1 is lost: it is silent for 5.0 s"))
        status, text, _ = await status_of(call)
        assert status == "UNAVAILABLE"
        assert text == "host 1 is lost: it is silent for 5.0 s"
        assert harness.lifecycle.phase == "failed"
        with pytest.raises(HostLostError, match="host 1 is lost"):
            await harness.running
        executor.gate.set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(ROUNDS * 300)
@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kf_h01_whatever_happens_to_a_host_ends_all_within_ten_seconds(
    case: Case, num_hosts: int, model: Path, tmp_path: Path
):
    mesh = "tp2" if num_hosts == 2 else f"dp{num_hosts}"
    for _ in range(ROUNDS):
        with Group(tmp_path, num_hosts, *model_arguments(model, tmp_path, mesh)) as group:
            group.wait_ready()
            outcome = play(group, case)
        assert max(outcome.health_s, outcome.stream_s, outcome.exit_s) < END_S


@pytest.mark.slow
def test_three_processes_answer_like_one(model: Path, tmp_path: Path):
    answers = []
    for num_hosts in (1, 3):
        with Group(tmp_path, num_hosts, *model_arguments(model, tmp_path, "dp3")) as group:
            group.wait_ready()
            with grpc.insecure_channel(group.address) as channel:
                streams = [Stream(Stub(channel), range(3, 3 + n), 12) for n in (5, 40)]
                for stream in streams:
                    stream.join(60.0)
                answers.append([stream.token_ids for stream in streams])
            group.processes[0].send_signal(signal.SIGTERM)
            assert group.exit_codes() == [0] * num_hosts
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@pytest.mark.slow
def test_kf_h03_file_that_one_process_cannot_read_is_the_error_of_all(model: Path, tmp_path: Path):
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    missing = sorted(damaged.glob("*.safetensors"))[0]
    missing.unlink()
    arguments = model_arguments(model, tmp_path, "tp2")
    of_host = {1: ("--model", str(damaged))}
    with Group(tmp_path, 2, *arguments, of_host=of_host) as group:
        codes = group.exit_codes(START_S)
    assert codes == [2, 2], group.all_text()
    assert group.last_line(0).startswith("serve.py: error: host 1: ")
    assert group.last_line(1).startswith("serve.py: host 1: /")
    assert missing.name in group.last_line(0)


@pytest.mark.slow
def test_kf_h03_options_that_differ_are_named_by_all(model: Path, tmp_path: Path):
    arguments = model_arguments(model, tmp_path, "tp2")
    with Group(tmp_path, 2, *arguments, of_host={1: ("--max-rows", "2")}) as group:
        codes = group.exit_codes(START_S)
    assert codes == [2, 2]
    for host_id in (0, 1):
        assert "--max-rows differs: got 2 from host 1; expected 1" in group.last_line(host_id)


@pytest.mark.slow
def test_host_that_never_comes_is_named_by_all(model: Path, tmp_path: Path):
    arguments = (*model_arguments(model, tmp_path, "dp3"), "--start-timeout", "20")
    with Group(tmp_path, 3, *arguments) as group:
        group.processes[2].kill()
        codes = group.exit_codes(START_S)
    assert codes == [1, 1, -signal.SIGKILL]
    for host_id in (0, 1):
        assert "got none of host 2 within 20 s" in group.last_line(host_id)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_that_the_server_starts_itself_end_with_it(
    number: signal.Signals, model: Path, tmp_path: Path
):
    arguments = (*model_arguments(model, tmp_path, "tp2"), "--processes", "2")
    with Group(tmp_path, 1, *arguments) as group:
        group.wait_ready()
        assert "[host 1] worker ready host=1" in group.text(0)
        children = children_of(group.processes[0].pid)
        assert len(children) == 1
        group.processes[0].send_signal(number)
        assert group.exit_codes() == [0 if number is signal.SIGTERM else -signal.SIGKILL]
        until(lambda: not any(map(is_alive, children)), END_S, group.all_text)


@pytest.mark.slow
def test_supervisor_starts_the_group_again_and_it_serves(model: Path, tmp_path: Path):
    coordinator, control, port = free_ports(3)
    address = f"127.0.0.1:{port}"
    command = ["scripts/launch/local_two_processes.sh", "--restart", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        script = subprocess.Popen(
            [
                *command,
                *("--control-port", str(control)),
                *model_arguments(model, tmp_path, "tp2"),
            ],
            cwd=ROOT,
            env=os.environ | {"COORDINATOR_PORT": str(coordinator), "PYTHON": sys.executable},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        for starts in (1, 2):
            until(lambda: log.read_text().count("\nready ") == starts, START_S, log.read_text)  # noqa: B023
            with grpc.insecure_channel(address) as channel:
                stream = Stream(Stub(channel), (5, 6, 7), 5)
                stream.join(60.0)
            assert stream.status == "OK"
            if starts == 1:
                os.kill(children_of(script.pid)[1], signal.SIGKILL)
        script.terminate()
        assert script.wait(END_S) == 0
        assert "starting again after exit code" in log.read_text()
    finally:
        if script.poll() is None:
            for child in children_of(script.pid):
                os.kill(child, signal.SIGKILL)
            script.kill()
            script.wait()


def children_of(pid: int) -> list[int]:
    """Ids of the processes that a process has started, in their order."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
