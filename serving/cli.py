"""The server program: start-up in order, its report, its exit codes.

Here the parts are put together. What imports jax is imported late, so that `--help` and a mistake
in the options answer at once, and the environment is set before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from k3jax.buckets import Bucket
from k3jax.config import ConfigError
from serving.engine import Engine
from serving.options import EXIT_FAILED, EXIT_REFUSED, Options, parse_options
from serving.page_table import empty_table, report
from serving.processes.agreement import gather_facts
from serving.processes.children import die_with_parent
from serving.processes.guard import GuardedExecutor
from serving.processes.leader import HostLostError, Leader
from serving.processes.place import Place
from serving.processes.relay import start_relay
from serving.processes.repeat import SharedModel
from serving.processes.roles import GroupConfig, Outcome, lead, report_failure, start_group, work
from serving.processes.watch import LAST_PHASE
from serving.processes.worker import Worker
from serving.profiler import ProfiledExecutor, Profiler
from serving.record import open_recorder
from serving.rpc.lifecycle import Lifecycle, Served
from serving.rpc.logs import configure_logs, log_event, log_exception
from serving.rpc.metrics import serve_metrics
from serving.rpc.service import EngineService, ServiceConfig
from serving.scheduler import make_limits
from serving.server import (
    OnFailure,
    Server,
    ServerConfig,
    ServerError,
    StoppedWhileLoadingError,
    in_daemon_thread,
)
from serving.setup import Setup, find_place, group_options, prepare
from serving.tokenizer import TokenizerError

if TYPE_CHECKING:
    from k3jax.paged_model import PagedModel
    from serving.build import LoadedModel
    from serving.rpc.spans import Traces

_CLOSE_TRACES_S = 5.0

# At the end of a phase of the start: waits for the other processes, returns the smallest value.
Barrier = Callable[[str, int], int]

# Errors whose message says all; others are bugs and keep their traceback.
_EXPLAINED = (ConfigError, TokenizerError, ServerError, HostLostError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped, and return the exit code."""
    options = parse_options(argv)
    configure_logs(options.log_level)
    die_with_parent(os.environ)
    try:
        place = find_place(options)
        if not place.is_alone:
            _run_in_group(options, place)
        asyncio.run(_serve(prepare(options)))
    except StoppedWhileLoadingError:
        # The loading thread is inside native code: it cannot be stopped, only left behind.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _EXPLAINED as error:
        code, message = _explain(error)
        print(f"serve.py: error: {message}", file=sys.stderr, flush=True)
        return code
    return 0


def start_model(setup: Setup, on_failure: OnFailure, leader: Leader | None = None) -> Served:
    """Load the weights, compile every step, and make the engine. Takes minutes for a large model.

    Args:
      on_failure: called, in the engine's thread, if the engine fails later.
      leader: of the group, if this process leads one.

    Raises:
      ConfigError: the model does not fit the devices, or its weights cannot be used.
      HostLostError: another process of the group is lost.
    """
    from k3jax.compile import CompileCounter
    from serving.executor import Executor
    from serving.tracing import XlaTracer

    options = setup.options
    if leader is not None:
        leader.gather(options.start_timeout)
    loaded, num_pages = _load_weights(setup, leader.barrier if leader else _alone)
    limits = make_limits(
        setup.engine,
        loaded.geometry,
        num_pages=num_pages,
        vocab_size=setup.model.vocab_size,
        max_waiting=options.max_waiting,
        max_waiting_tokens=options.max_waiting_tokens,
        draft_cost=options.draft_cost,
        drafter="ngram" if options.speculate == "ngram" else "device",
    )
    table = empty_table(loaded.geometry, num_pages, setup.policy)
    say(report(loaded.geometry, num_pages, num_replicas=setup.parallel.dp))
    model, buckets = _compile(loaded, num_pages, leader.barrier if leader else _alone)
    if leader is None:
        executor = Executor(model)
    else:
        executor = GuardedExecutor(Executor(SharedModel(model, leader, buckets)), leader)
    compiled = CompileCounter()
    # What the start-up made stays: collecting garbage need not look at it again.
    gc.collect()
    gc.freeze()
    num_replicas = setup.parallel.dp
    recorder = None
    if options.record:
        recorder = open_recorder(options.record, table, limits, num_replicas=num_replicas)
    tables = (table,) * num_replicas
    profiler = Profiler(setup.cache_dir / "profiles", XlaTracer())
    engine = Engine(
        ProfiledExecutor(executor, profiler),
        limits,
        tables,
        recorder=recorder,
        on_failure=on_failure,
    )
    return Served(
        engine=engine,
        limits=limits,
        page_tokens=loaded.geometry.page_tokens,
        profiler=profiler,
        compilations=lambda: compiled.count,
    )


def _load_weights(setup: Setup, barrier: Barrier) -> tuple[LoadedModel, int]:
    """Load this process's part of the weights, and choose the pages of the pool."""
    from sharding.devices import prepare_devices
    from sharding.distributed import ProcessGroup, join

    options, place = setup.options, setup.place
    joining = None
    if not place.is_alone:
        coordinator = place.coordinator
        if place.host_id:
            coordinator = f"127.0.0.1:{start_relay(place.address, place.coordinator_port)}"
        group = ProcessGroup(
            coordinator=coordinator,
            num_processes=place.num_hosts,
            process_id=place.host_id,
            local_devices=place.local_devices(setup.parallel.num_ranks),
        )
        joining = functools.partial(join, group, timeout_s=options.start_timeout)
    notice = prepare_devices(setup.parallel.num_ranks // place.num_hosts, join=joining)
    if notice:
        say(notice)
    from k3jax.weights import progress_bar
    from serving.build import choose_num_pages, load_model

    with progress_bar("weights") as progress:
        loaded = load_model(
            setup.folder,
            setup.engine,
            setup.parallel,
            draft_dir=setup.draft_dir,
            unit_tokens=options.page_unit,
            weight_cache=options.weight_cache,
            progress=progress,
        )
    num_pages = options.num_pages or choose_num_pages(loaded, options.pool_bytes)
    return loaded, barrier("loaded", num_pages)


def _compile(
    loaded: LoadedModel, num_pages: int, barrier: Barrier
) -> tuple[PagedModel, tuple[Bucket, ...]]:
    """Compile every step, and try one if its devices belong to several processes."""
    from serving.build import build_model, num_buckets, rehearse

    reporter = _compile_reporter(num_buckets(loaded))
    model, buckets = build_model(loaded, num_pages=num_pages, on_compiled=reporter)
    barrier("compiled", 0)
    if barrier is not _alone:
        rehearse(model, buckets[0])
        barrier(LAST_PHASE, 0)
    return model, buckets


def _load_part(setup: Setup, worker: Worker) -> tuple[PagedModel, tuple[Bucket, ...]]:
    """Start as a process that repeats what another one leads."""
    loaded, num_pages = _load_weights(setup, worker.barrier)
    return _compile(loaded, num_pages, worker.barrier)


def _alone(phase: str, value: int) -> int:
    """A barrier of one process."""
    return value


def _run_in_group(options: Options, place: Place) -> NoReturn:
    """Be one process of a server of several; see `serving.processes`."""
    config = GroupConfig(start_s=options.start_timeout, step_s=options.step_timeout)
    place, exit, key = start_group(place)
    try:
        setup = dataclasses.replace(prepare(options), place=place)
    except _EXPLAINED as error:
        code, message = _explain(error)
        log_event("start_failed", message=message)
        report_failure(place, config, key, (code, message))
        exit.now(code, f"serve.py: error: {message}")
    facts = gather_facts(group_options(options), setup.folder)

    def serve(leader: Leader) -> Outcome:
        try:
            asyncio.run(_serve(setup, leader))
        except (StoppedWhileLoadingError, KeyboardInterrupt):
            return 0, ""
        except Exception as error:
            return _explain(error)
        return 0, ""

    if place.host_id == 0:
        lead(place, facts, config, exit, key, serve)
    work(place, facts, config, exit, key, functools.partial(_load_part, setup), _explain)


def say(text: str) -> None:
    """Print a part of the start-up report."""
    print(text, flush=True)


async def _serve(setup: Setup, leader: Leader | None = None) -> None:
    """Serve until SIGTERM or SIGINT; the second signal ends what still runs."""
    begin_s = time.monotonic()
    options = setup.options
    lifecycle = Lifecycle()
    traces = _open_traces(setup)
    service = EngineService(
        ServiceConfig(
            dtype=setup.engine.dtype,
            num_replicas=setup.parallel.dp,
            max_rows=setup.engine.max_rows,
            unit_tokens=setup.policy.unit_tokens,
            output_buffer_tokens=options.output_buffer,
        ),
        setup.info,
        lifecycle,
        tokenizer=setup.tokenizer,
        bundle=setup.bundle,
        draw_seed=lambda: secrets.randbits(32),
        traces=traces,
    )
    config = ServerConfig(
        host=options.host,
        port=options.port,
        tls=setup.tls,
        max_message_bytes=options.max_message_bytes,
        drain_s=options.drain_seconds,
    )
    server = Server(config, service, lifecycle)
    address = await server.open()
    if options.metrics_port is not None:
        port = serve_metrics(service.metrics, options.host, options.metrics_port)
        log_event("metrics", url=f"http://{options.host}:{port}/metrics")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    _say_configuration(setup)

    def on_ready() -> None:
        seconds = time.monotonic() - begin_s
        say(f"ready {address} model={setup.info.name} mesh={options.mesh} startup={seconds:.1f}s")

    start = functools.partial(start_model, setup)
    if leader is not None:
        leader.attach(on_lost=server.fail, on_drain=server.drain)
        start = functools.partial(start, leader=leader)
    try:
        await server.run(start, on_ready=on_ready)
    finally:
        if traces is not None:
            await _close_traces(traces)


def _open_traces(setup: Setup) -> Traces | None:
    """Traces of calls, if they are asked for."""
    endpoint = setup.options.otlp_endpoint
    if endpoint is None:
        return None
    from serving.rpc.spans import open_traces

    return open_traces(endpoint, setup.info.name)


async def _close_traces(traces: Traces) -> None:
    """Send the last spans. Nobody waits long for a collector that does not take them."""
    await asyncio.wait([in_daemon_thread(traces.close)], timeout=_CLOSE_TRACES_S)
    log_event("traces_closed", ended=traces.num_ended, sent=traces.num_sent)


def _say_configuration(setup: Setup) -> None:
    """Print every option, with the values that were chosen for those left open."""
    chosen: dict[str, object] = {
        "model": setup.folder,
        "draft": setup.draft_dir,
        "served_model_name": setup.info.name,
        "cache_dir": setup.cache_dir,
        "compile_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "experts": setup.parallel.experts,
        "hash_block_size": setup.policy.unit_tokens,
        "max_context": setup.engine.max_context_tokens,
        "max_prefill_rows": setup.engine.max_prefill_rows,
    }
    values = {
        name: chosen.get(name, value) for name, value in dataclasses.asdict(setup.options).items()
    }
    say("configuration: " + " ".join(f"{name}={value}" for name, value in values.items()))


def _compile_reporter(num_buckets: int) -> Callable[[Bucket, float], None]:
    done = 0

    def on_compiled(bucket: Bucket, seconds: float) -> None:
        nonlocal done
        done += 1
        say(
            f"compiled {done}/{num_buckets}: {bucket.kind} of {bucket.tokens} tokens, "
            f"{bucket.rows} rows, {bucket.pages} pages a row, {seconds:.1f} s"
        )

    return on_compiled


def _explain(error: BaseException) -> Outcome:
    """The exit code for an error, and one line about it, whatever there is to say."""
    match error:
        case ConfigError():
            return EXIT_REFUSED, _join(error.problems)
        case HostLostError():
            return error.code, str(error)
        case TokenizerError():
            return EXIT_REFUSED, str(error)
        case ServerError() | OSError():
            return EXIT_FAILED, str(error)
        case _:
            log_exception("failed", error)
            return EXIT_FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _join(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    numbered = (f"({i}) {problem}" for i, problem in enumerate(problems, start=1))
    return f"{len(problems)} problems: {'; '.join(numbered)}"
