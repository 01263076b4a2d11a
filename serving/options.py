"""The options of the server, their checks and their help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn, get_args

from k3jax.config import MAX_DRAFTS, DraftSampling, Dtype
from pallas_kernels.settings import IMPLEMENTATIONS
from serving.cache_options import DEFAULT_UNIT_TOKENS, Retention, parse_retention
from serving.option_types import byte_size, endpoint, number
from sharding.axes import Dispatch, ShardTokens, Tail

type Switch = Literal["on", "off"]
type Speculate = Literal["off", "ngram", "dspark"]

# One process drives all devices of its machine.
DEFAULT_PROCESSES = 1

DEFAULT_NGRAM_DRAFTS = 4

EXIT_FAILED = 1
EXIT_REFUSED = 2

_EPILOG = f"""\
exit codes:
  0  stopped by SIGTERM or SIGINT; a second signal cuts the drain short
  {EXIT_FAILED}  the port is taken, the engine failed, or a host was lost
  {EXIT_REFUSED}  the options, the model or the mesh were refused
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parsed command line; `build_parser` says what each option means."""

    model: Path | None
    served_model_name: str | None
    dtype: Dtype
    kernels: str
    pdl: Switch
    cache_dir: Path | None
    weight_cache: Path | None
    compile_cache: Path | None
    mesh: str
    experts: Literal["auto", "ep", "tp"]
    dispatch: Dispatch
    tail: Tail
    shard_tokens: ShardTokens
    num_pages: int | None
    pool_bytes: int | None
    page_unit: int
    prefix_cache: Switch
    hash_block_size: int | None
    state_retention: Retention
    answer_end_state: Switch
    max_rows: int
    max_context: int | None
    max_prefill_tokens: int
    max_prefill_rows: int | None
    speculate: Speculate
    draft: Path | None
    num_drafts: int | None
    draft_cost: float
    draft_sampling: DraftSampling
    max_waiting: int
    max_waiting_tokens: int | None
    output_buffer: int
    host: str
    port: int
    metrics_port: int | None
    otlp_endpoint: str | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    max_message_bytes: int
    drain_seconds: float
    log_level: str
    record: Path | None
    coordinator: str | None
    num_hosts: int | None
    host_id: int | None
    control_port: int | None
    processes: int
    start_timeout: float
    step_timeout: float


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line; a mistake in it prints one line and exits with `EXIT_REFUSED`."""
    return Options(**vars(build_parser().parse_args(argv)))


def build_parser() -> argparse.ArgumentParser:
    """The parser, with all its help."""
    parser = _Parser(
        prog="serve.py",
        description="Serve a Kimi K3 or Kimi-Linear checkpoint over gRPC (vllm.grpc.engine).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    _add_mesh(parser)
    _add_cache(parser)
    _add_reuse(parser)
    _add_scheduling(parser)
    _add_network(parser)
    _add_processes(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line instead of the whole usage."""
        print(f"{self.prog}: error: {message}; see --help", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint folder with config.json, safetensors and tokenizer files "
        "(default: the embedded model, a small K3 that was trained on Python sources)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: the folder's name)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of activations, dense weights and the MLA cache (default: %(default)s)",
    )
    group.add_argument(
        "--kernels",
        choices=("auto", *IMPLEMENTATIONS),
        default="auto",
        help="auto takes for each operator the fastest implementation known for the device and "
        "logs it; a name takes that one for every operator that has it, and refuses to start where "
        "it cannot be used (default: %(default)s)",
    )
    group.add_argument(
        "--pdl",
        choices=("on", "off"),
        default="off",
        help="let kernels for Hopper start while the one before still runs (default: %(default)s)",
    )
    group.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="for compiled steps (default: $XDG_CACHE_HOME/k3jax, or ~/.cache/k3jax)",
    )
    group.add_argument(
        "--weight-cache",
        type=Path,
        metavar="DIR",
        help="keep converted weights here, so that a killed load resumes and the next start reads "
        "only them; takes as much room as the checkpoint (default: keep none)",
    )
    group.add_argument(
        "--compile-cache",
        type=Path,
        metavar="DIR",
        help="for compiled steps (default: $JAX_COMPILATION_CACHE_DIR, or compiled in --cache-dir)",
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mesh")
    group.add_argument(
        "--mesh",
        default="tp1",
        metavar="MESH",
        help="devices: tp8 splits heads and vocabulary over eight, dp2xtp4 makes two replicas of "
        "attention of four each; experts lie over all. On a host without accelerators the devices "
        "are simulated (default: %(default)s)",
    )
    group.add_argument(
        "--experts",
        choices=("auto", "ep", "tp"),
        default="auto",
        help="ep gives each device whole experts, tp a slice of every expert, auto takes ep where "
        "the number of experts divides (default: %(default)s)",
    )
    group.add_argument(
        "--dispatch",
        choices=get_args(Dispatch),
        default="all_gather",
        help="how tokens reach experts on other devices: all of them everywhere, in a fixed number "
        "of places for each pair of devices, or exactly those needed (ragged; not on CPUs) "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--tail",
        choices=get_args(Tail),
        default="auto",
        help="how results of experts are summed over tp and projected up; auto chooses by the "
        "number of tokens; fused is one kernel for Hopper and steps of up to 32 tokens, not yet "
        "measured (default: %(default)s)",
    )
    group.add_argument(
        "--shard-tokens",
        choices=get_args(ShardTokens),
        default="auto",
        help="whether each device of tp does norms, routing and projections for its share of a "
        "prompt's tokens only; auto does where they divide (default: %(default)s)",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--num-pages",
        type=number(int, at_least=2),
        metavar="N",
        help="pages of each replica's pool, the null page included (default: what the device's "
        "memory leaves; on a CPU, what twice --max-rows full contexts need)",
    )
    size.add_argument(
        "--pool-bytes",
        type=byte_size,
        metavar="SIZE",
        help="bytes of the pool on each device, for example 64G",
    )
    group.add_argument(
        "--page-unit",
        type=number(int, at_least=1),
        default=128,
        metavar="N",
        help="a page is a multiple of N tokens (default: %(default)s)",
    )


def _add_reuse(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefix reuse")
    group.add_argument(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="whether a request reuses what earlier ones with the same prefix left in the pool "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hash-block-size",
        type=number(int, at_least=1),
        metavar="N",
        help="tokens a prefix key; prefixes are shared in steps of N, which divides the page "
        f"(default: the largest divisor of the page that divides {DEFAULT_UNIT_TOKENS}; the page, "
        "if the model has no recurrent layers)",
    )
    group.add_argument(
        "--state-retention",
        type=parse_retention,
        default="semantic",
        metavar="HOW",
        help="recurrent states kept for reuse: semantic keeps those at ends and forks of prompts, "
        "dense one every page, a number N also one every N tokens, which is a multiple of the page "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--answer-end-state",
        choices=("on", "off"),
        default="on",
        help="keep the state at the end of each answer, so that the next turn of a conversation "
        "does not compute the answer again (default: %(default)s)",
    )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--max-rows",
        type=number(int, at_least=1),
        default=8,
        metavar="N",
        help="requests that run at once, in each replica of attention (default: %(default)s)",
    )
    group.add_argument(
        "--max-context",
        type=number(int, at_least=2),
        metavar="N",
        help="tokens of a request, prompt and output (default: the model's, at most 4096)",
    )
    group.add_argument(
        "--max-prefill-tokens",
        type=number(int, at_least=1),
        default=256,
        metavar="N",
        help="prompt tokens of one step, in each replica (default: %(default)s)",
    )
    group.add_argument(
        "--max-prefill-rows",
        type=number(int, at_least=1),
        metavar="N",
        help="requests that share a step with prompt tokens (default: --max-rows, at most 4)",
    )
    group.add_argument(
        "--speculate",
        choices=get_args(Speculate.__value__),
        default="off",
        help="propose several tokens and verify them in one step: dspark has a draft model, ngram "
        "repeats what followed the same tokens before; the text stays as likely as without "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="checkpoint folder of the draft model, for --speculate dspark (default: the embedded "
        "model's own draft)",
    )
    group.add_argument(
        "--num-drafts",
        type=number(int, at_least=1, at_most=MAX_DRAFTS),
        metavar="N",
        help="proposed tokens of a request and step, at most (default: the draft model's, or "
        f"{DEFAULT_NGRAM_DRAFTS} of ngram)",
    )
    group.add_argument(
        "--draft-sampling",
        choices=get_args(DraftSampling),
        default="probabilistic",
        help="whether a draft model takes its likeliest tokens or, at a temperature, draws "
        "them; answers are distributed the same (default: %(default)s)",
    )
    group.add_argument(
        "--draft-cost",
        type=number(float, at_least=0),
        default=0.1,
        metavar="C",
        help="how much longer a step takes with each draft, as a share of a step without. Requests "
        "whose drafts do not pay for that get fewer or none; 0 always tries all "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-waiting",
        type=number(int, at_least=1),
        default=1024,
        metavar="N",
        help="requests that may wait; more are refused at once (default: %(default)s)",
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=number(int, at_least=1),
        metavar="N",
        help="tokens of the requests that may wait (default: eight times --max-context)",
    )
    group.add_argument(
        "--output-buffer",
        type=number(int, at_least=1),
        default=256,
        metavar="N",
        help="tokens that wait for a slow client before its request pauses (default: %(default)s)",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; without --tls-client-ca there is no authentication "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--port",
        type=number(int, at_least=0, at_most=65535),
        default=50051,
        help="0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--metrics-port",
        type=number(int, at_least=0, at_most=65535),
        metavar="PORT",
        help="serve Prometheus metrics over HTTP at /metrics of this port (default: not served)",
    )
    group.add_argument(
        "--otlp-endpoint",
        type=endpoint,
        metavar="HOST:PORT",
        help="send traces of requests to an OpenTelemetry collector that takes OTLP over gRPC "
        "there, by TLS if https:// stands before it; needs the extra `otel` (default: no traces)",
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain: serve TLS only"
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM key of --tls-cert")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="PEM certificates: take only clients with a certificate that one of them signed",
    )
    group.add_argument(
        "--max-message-bytes",
        type=byte_size,
        default="64M",
        metavar="SIZE",
        help="largest request message; larger ones end with RESOURCE_EXHAUSTED "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=number(float, at_least=0),
        default=30.0,
        metavar="S",
        help="time that running requests have to finish after SIGTERM (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="of the log on stderr (default: %(default)s)",
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what the scheduler is told to FILE, all token ids included, one JSON object a "
        "line; scripts/view_cache.py shows the cache at any step of it (default: no file)",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "processes",
        "One server over several machines: start it on each with the same options. Host 0 has the "
        "port. Under LeaderWorkerSet and srun the first three options are found by themselves.",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="host 0's address for the others, and a free port there",
    )
    group.add_argument(
        "--num-hosts",
        type=number(int, at_least=1),
        metavar="N",
        help="machines of the server (default: 1)",
    )
    group.add_argument(
        "--host-id",
        type=number(int, at_least=0),
        metavar="I",
        help="which of them this is, from 0 on",
    )
    group.add_argument(
        "--control-port",
        type=number(int, at_least=1, at_most=65535),
        metavar="PORT",
        help="of host 0, for the server's own messages (default: the one after the coordinator's)",
    )
    group.add_argument(
        "--processes",
        type=number(int, at_least=1),
        default=DEFAULT_PROCESSES,
        metavar="N",
        help="processes on this machine, which share its devices; each counts as a host in what "
        "the server prints (default: %(default)s)",
    )
    group.add_argument(
        "--start-timeout",
        type=number(float, at_least=1),
        default=300.0,
        metavar="S",
        help="time for all hosts to come (default: %(default)s)",
    )
    group.add_argument(
        "--step-timeout",
        type=number(float, at_least=1),
        default=30.0,
        metavar="S",
        help="a step that takes longer is taken as a host that hangs, and ends the server; only "
        "with several processes (default: %(default)s)",
    )


def default_cache_dir() -> Path:
    """Folder for compiled steps when no option names one."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k3jax"
