"""What a server needs before its model is loaded: options, configuration, tokenizer, its place.

Everything here answers at once, so that a mistake is found before the minutes of the start. jax is
imported, but not used.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path

from k3jax.cache_spec import cache_spec
from k3jax.config import ConfigError, EngineConfig, ModelConfig, validate
from k3jax.draft.config import DraftConfig
from k3jax.inputs import EXPORT_TOKENS
from pallas_kernels.settings import KernelSettings
from serving.cache_options import cache_policy
from serving.options import DEFAULT_NGRAM_DRAFTS, Options, default_cache_dir
from serving.page_table import align
from serving.page_table.policy import CachePolicy
from serving.processes.place import Place, PlaceFlags, check_ranks, resolve
from serving.rpc.bundle import Bundle, build_bundle
from serving.rpc.model_info import ModelInfo, read_model_info
from serving.tls import TlsFiles, find_tls
from serving.tokenizer import Tokenizer, load_folder
from sharding.axes import ParallelConfig, parse_mesh

EMBEDDED_NAME = "k3-embedded"
_DEFAULT_CONTEXT_TOKENS = 4096

# Paths may differ from machine to machine, and only host 0 has a port.
_OPTIONS_OF_A_PROCESS = {
    "model",
    "served_model_name",
    "cache_dir",
    "weight_cache",
    "compile_cache",
    "draft",
    "record",
    "host",
    "port",
    "metrics_port",
    "otlp_endpoint",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "max_message_bytes",
    "drain_seconds",
    "log_level",
    "coordinator",
    "num_hosts",
    "host_id",
    "control_port",
    "processes",
    "start_timeout",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a server needs before its model is loaded.

    Attributes:
      folder: of the model's checkpoint.
      draft_dir: of the draft model's, if there is one.
    """

    options: Options
    cache_dir: Path
    folder: Path
    draft_dir: Path | None
    model: ModelConfig
    engine: EngineConfig
    parallel: ParallelConfig
    place: Place
    policy: CachePolicy
    tokenizer: Tokenizer | None
    bundle: Bundle | None
    info: ModelInfo
    tls: TlsFiles | None


def find_place(options: Options) -> Place:
    """Which process of which group this one is.

    Raises:
      ConfigError: that is half described, or contradicts itself.
    """
    flags = PlaceFlags(
        coordinator=options.coordinator,
        num_hosts=options.num_hosts,
        host_id=options.host_id,
        control_port=options.control_port,
        processes=options.processes,
    )
    return resolve(flags, os.environ)


def group_options(options: Options) -> dict[str, object]:
    """The options that all processes of a group must have in common."""
    values = dataclasses.asdict(options)
    return {name: value for name, value in values.items() if name not in _OPTIONS_OF_A_PROCESS}


def prepare(options: Options) -> Setup:
    """Find the model and read all of it but the weights.

    Raises:
      ConfigError, TokenizerError: a configuration or the tokenizer cannot be used.
    """
    try:
        sizes = parse_mesh(options.mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    place = find_place(options)
    # Only the first process of a group has a port.
    tls = None
    if place.host_id == 0:
        tls = find_tls(options.tls_cert, options.tls_key, options.tls_client_ca)
    if options.record is not None and place.host_id == 0:
        _check_record(options.record)
    if options.otlp_endpoint is not None and place.host_id == 0:
        _check_library(options.otlp_endpoint)
    cache_dir = options.cache_dir or default_cache_dir()
    _choose_compile_cache(options.compile_cache, cache_dir)
    from k3jax.weights import EMBEDDED_MODEL, read_model_config

    folder = options.model or EMBEDDED_MODEL
    model = read_model_config(folder)
    draft_dir = _find_draft(options)
    draft = _read_draft(draft_dir, model) if draft_dir else None
    experts = options.experts
    if experts == "auto":
        experts = "ep" if model.num_experts % (sizes["dp"] * sizes["tp"]) == 0 else "tp"
    engine = EngineConfig(
        dtype=options.dtype,
        max_rows=options.max_rows,
        max_context_tokens=options.max_context
        or min(model.max_position_tokens, _DEFAULT_CONTEXT_TOKENS),
        max_prefill_tokens=options.max_prefill_tokens,
        max_prefill_rows=options.max_prefill_rows or min(4, options.max_rows),
        num_drafts=_num_drafts(options, draft),
        draft_sampling=options.draft_sampling,
        kernels=KernelSettings(
            implementation=None if options.kernels == "auto" else options.kernels,
            pdl=options.pdl == "on",
        ),
    )
    parallel = ParallelConfig(
        dp=sizes["dp"],
        tp=sizes["tp"],
        experts=experts,
        dispatch=options.dispatch,
        tail=options.tail,
        shard_tokens=options.shard_tokens,
    )
    validate(model, parallel, engine)
    check_ranks(place, parallel.num_ranks)
    policy = cache_policy(
        align(
            cache_spec(model, tp=parallel.tp, dtype=engine.dtype, draft=draft),
            unit_tokens=options.page_unit,
        ),
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
        draft_dir=draft_dir,
        model=model,
        engine=engine,
        parallel=parallel,
        place=place,
        policy=policy,
        tokenizer=tokenizer,
        bundle=build_bundle(folder) if tokenizer else None,
        info=read_model_info(
            folder, model, tokenizer, name=name, max_context_tokens=engine.max_context_tokens
        ),
        tls=tls,
    )


def _find_draft(options: Options) -> Path | None:
    """The folder of the draft model, if one is asked for: the embedded model has its own."""
    if options.speculate != "dspark":
        if options.draft is not None:
            raise ConfigError(
                f"--draft does not fit --speculate {options.speculate}: got {options.draft}; "
                "expected it with dspark only"
            )
        return None
    from k3jax.weights import EMBEDDED_DRAFT

    if options.draft is None and options.model is not None:
        raise ConfigError(
            "--draft is missing: got --speculate dspark with a --model; expected the folder of a "
            "draft model for it"
        )
    return options.draft or EMBEDDED_DRAFT


def _read_draft(folder: Path, model: ModelConfig) -> DraftConfig:
    """A draft model's configuration, which fits the model."""
    from k3jax.weights import read_draft_config

    draft = read_draft_config(folder)
    draft.check_target(model)
    return draft


def _num_drafts(options: Options, draft: DraftConfig | None) -> int:
    """Drafts of a row and step.

    Raises:
      ConfigError: more than the draft model makes.
    """
    if options.speculate == "off":
        return 0
    if draft is None:
        return options.num_drafts or DEFAULT_NGRAM_DRAFTS
    if options.num_drafts is not None and options.num_drafts > draft.num_drafts:
        raise ConfigError(
            f"--num-drafts is too large: got {options.num_drafts}; expected at most the "
            f"{draft.num_drafts} of the draft model"
        )
    return options.num_drafts or draft.num_drafts


def _check_record(path: Path) -> None:
    """Refuse a record that could not be written, before anything is loaded."""
    if path.exists():
        raise ConfigError(f"--record exists already: got {path}; expected a new file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--record cannot be written: got {path}; expected a folder that exists and is writable"
        )


def _check_library(endpoint: str) -> None:
    """Refuse traces that could not be made."""
    try:
        importlib.import_module("serving.rpc.spans")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint cannot be used: got {endpoint}, but {error}; install the extra `otel`"
        ) from error


def _choose_compile_cache(folder: Path | None, cache_dir: Path) -> None:
    """Tell jax, which is not imported yet, where to keep compiled steps."""
    if folder is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir / "compiled"))
    # By default only programs that took a second to compile are kept.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
