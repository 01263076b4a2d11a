"""The server program: start-up in order, its report, its exit codes.

Here the parts are put together. What imports jax is imported late, so that `--help` and a mistake
in the options answer at once, and the environment is set before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k3jax.cache_spec import cache_spec
from k3jax.config import ConfigError, EngineConfig, ModelConfig, validate
from k3jax.inputs import EXPORT_TOKENS
from serving.cache_options import cache_policy
from serving.engine import Engine
from serving.options import (
    EXIT_FAILED,
    EXIT_REFUSED,
    Options,
    default_cache_dir,
    parse_options,
)
from serving.page_table import align, empty_table, report
from serving.page_table.policy import CachePolicy
from serving.record import open_recorder
from serving.rpc.bundle import Bundle, build_bundle
from serving.rpc.lifecycle import Lifecycle, Served
from serving.rpc.logs import configure_logs
from serving.rpc.model_info import ModelInfo, read_model_info
from serving.rpc.service import EngineService, ServiceConfig
from serving.scheduler import make_limits
from serving.server import OnFailure, Server, ServerConfig, ServerError, StoppedWhileLoadingError
from serving.tokenizer import Tokenizer, TokenizerError, load_folder
from sharding.axes import ParallelConfig, parse_mesh

if TYPE_CHECKING:
    from k3jax.buckets import Bucket

EMBEDDED_NAME = "k3-embedded"
_DEFAULT_CONTEXT_TOKENS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a server needs before its model is loaded."""

    options: Options
    cache_dir: Path
    folder: Path
    model: ModelConfig
    engine: EngineConfig
    parallel: ParallelConfig
    policy: CachePolicy
    tokenizer: Tokenizer | None
    bundle: Bundle | None
    info: ModelInfo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped, and return the exit code."""
    options = parse_options(argv)
    configure_logs(options.log_level)
    try:
        asyncio.run(_serve(prepare(options)))
    except StoppedWhileLoadingError:
        # The loading thread is inside native code: it cannot be stopped, only left behind.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ConfigError as error:
        return _fail(EXIT_REFUSED, *error.problems)
    except TokenizerError as error:
        return _fail(EXIT_REFUSED, str(error))
    except (ServerError, OSError) as error:
        return _fail(EXIT_FAILED, str(error))
    return 0


def prepare(options: Options) -> Setup:
    """Find the model and read all of it but the weights.

    Raises:
      ConfigError, TokenizerError: a configuration or the tokenizer cannot be used.
    """
    try:
        sizes = parse_mesh(options.mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.record is not None:
        _check_record(options.record)
    cache_dir = options.cache_dir or default_cache_dir()
    _choose_compile_cache(options.compile_cache, cache_dir)
    from k3jax.weights import ensure_embedded, read_model_config

    folder = options.model or ensure_embedded(cache_dir)
    model = read_model_config(folder)
    experts = options.experts
    if experts == "auto":
        experts = "ep" if model.num_experts % sizes["tp"] == 0 else "tp"
    engine = EngineConfig(
        dtype=options.dtype,
        max_rows=options.max_rows,
        max_context_tokens=options.max_context
        or min(model.max_position_tokens, _DEFAULT_CONTEXT_TOKENS),
        max_prefill_tokens=options.max_prefill_tokens,
        max_prefill_rows=options.max_prefill_rows or min(4, options.max_rows),
    )
    parallel = ParallelConfig(**sizes, experts=experts)
    validate(model, parallel, engine)
    policy = cache_policy(
        align(cache_spec(model, tp=parallel.tp, dtype=engine.dtype), unit_tokens=options.page_unit),
        is_enabled=options.prefix_cache == "on",
        hash_block_size=options.hash_block_size,
        state_retention=options.state_retention,
        keep_answer_end=options.answer_end_state == "on",
        export_tokens=EXPORT_TOKENS,
    )
    tokenizer = load_folder(folder)
    name = options.served_model_name or (None if options.model else EMBEDDED_NAME)
    return Setup(
        options=options,
        cache_dir=cache_dir,
        folder=folder,
        model=model,
        engine=engine,
        parallel=parallel,
        policy=policy,
        tokenizer=tokenizer,
        bundle=build_bundle(folder) if tokenizer else None,
        info=read_model_info(
            folder, model, tokenizer, name=name, max_context_tokens=engine.max_context_tokens
        ),
    )


def start_model(setup: Setup, on_failure: OnFailure) -> Served:
    """Load the weights, compile every step, and make the engine. Takes minutes for a large model.

    Args:
      on_failure: called, in the engine's thread, if the engine fails later.

    Raises:
      ConfigError: the model does not fit the devices, or its weights cannot be used.
    """
    from sharding.devices import prepare_devices

    notice = prepare_devices(setup.parallel.num_ranks)
    if notice:
        say(notice)
    from k3jax.weights import progress_bar
    from serving.build import build_executor, choose_num_pages, load_model

    options = setup.options
    with progress_bar("weights") as progress:
        loaded = load_model(
            setup.folder,
            setup.engine,
            setup.parallel,
            unit_tokens=options.page_unit,
            weight_cache=options.weight_cache,
            progress=progress,
        )
    num_pages = options.num_pages or choose_num_pages(loaded, options.pool_bytes)
    limits = make_limits(
        setup.engine,
        loaded.geometry,
        num_pages=num_pages,
        vocab_size=setup.model.vocab_size,
        max_waiting=options.max_waiting,
        max_waiting_tokens=options.max_waiting_tokens,
    )
    table = empty_table(loaded.geometry, num_pages, setup.policy)
    say(report(loaded.geometry, num_pages))
    built = build_executor(
        loaded, num_pages=num_pages, on_compiled=_compile_reporter(len(limits.buckets))
    )
    # What the start-up made stays: collecting garbage need not look at it again.
    gc.collect()
    gc.freeze()
    recorder = open_recorder(options.record, table, limits) if options.record else None
    engine = Engine(built.executor, limits, table, recorder=recorder, on_failure=on_failure)
    return Served(engine=engine, limits=limits, page_tokens=loaded.geometry.page_tokens)


def say(text: str) -> None:
    """Print a part of the start-up report."""
    print(text, flush=True)


async def _serve(setup: Setup) -> None:
    """Serve until SIGTERM or SIGINT; the second signal ends what still runs."""
    begin_s = time.monotonic()
    options = setup.options
    lifecycle = Lifecycle()
    service = EngineService(
        ServiceConfig(
            dtype=setup.engine.dtype,
            max_rows=setup.engine.max_rows,
            unit_tokens=setup.policy.unit_tokens,
            output_buffer_tokens=options.output_buffer,
        ),
        setup.info,
        lifecycle,
        tokenizer=setup.tokenizer,
        bundle=setup.bundle,
        draw_seed=lambda: secrets.randbits(32),
    )
    config = ServerConfig(host=options.host, port=options.port, drain_s=options.drain_seconds)
    server = Server(config, service, lifecycle)
    address = await server.open()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    _say_configuration(setup)

    def on_ready() -> None:
        seconds = time.monotonic() - begin_s
        say(f"ready {address} model={setup.info.name} mesh={options.mesh} startup={seconds:.1f}s")

    await server.run(lambda on_failure: start_model(setup, on_failure), on_ready=on_ready)


def _check_record(path: Path) -> None:
    """Refuse a record that could not be written, before anything is loaded."""
    if path.exists():
        raise ConfigError(f"--record exists already: got {path}; expected a new file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--record cannot be written: got {path}; expected a folder that exists and is writable"
        )


def _choose_compile_cache(folder: Path | None, cache_dir: Path) -> None:
    """Tell jax, which is not imported yet, where to keep compiled steps."""
    if folder is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir / "compiled"))
    # By default only programs that took a second to compile are kept.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _say_configuration(setup: Setup) -> None:
    """Print every option, with the values that were chosen for those left open."""
    chosen: dict[str, object] = {
        "model": setup.folder,
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


def _fail(code: int, *problems: str) -> int:
    """Print one line, whatever there is to say, and return the exit code."""
    message = problems[0]
    if len(problems) > 1:
        numbered = (f"({i}) {problem}" for i, problem in enumerate(problems, start=1))
        message = f"{len(problems)} problems: {'; '.join(numbered)}"
    print(f"serve.py: error: {message}", file=sys.stderr, flush=True)
    return code
