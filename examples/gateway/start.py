"""Start the server and, in front of it, the gateway `smg`, which speaks the OpenAI API over HTTP.

    python examples/gateway/start.py [options below] [options of scripts/serve.py]

Prints `gateway ready` with its URL when requests are answered. SIGINT or SIGTERM ends both, first
the gateway; so does the end of one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

SERVE = Path(__file__).parents[2] / "scripts" / "serve.py"
READY_S, POLL_S = 60.0, 0.2
END_S = 60.0  # more than the server's default --drain-seconds


class StartError(Exception):
    """The two cannot run; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Run both until one ends or a signal comes, and return the exit code."""
    parser = build_parser()
    args, server_options = parser.parse_known_args(argv)
    if shutil.which(args.smg) is None:
        parser.error(f"--smg is not found: got {args.smg}; expected the program of the package smg")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        with contextlib.ExitStack() as stack:
            # The gateway would take a server that still loads for a healthy one, until it has
            # asked it three times.
            command = (sys.executable, str(SERVE), *server_options)
            server = stack.enter_context(child(*command, stdout=subprocess.PIPE))
            address, model = wait_server(server)
            gateway = stack.enter_context(child(*gateway_command(args, address)))
            url = f"http://{args.http_host}:{args.http_port}"
            wait_gateway(gateway, url, model)
            print(f"gateway ready {url}/v1 model={model}", flush=True)
            while True:
                check_runs(server, "the server")
                check_runs(gateway, "the gateway")
                time.sleep(POLL_S)
    except StartError as error:
        print(f"start.py: error: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The options of the gateway."""
    parser = argparse.ArgumentParser(
        prog="start.py",
        allow_abbrev=False,
        description=__doc__.splitlines()[0],
        epilog="All other options are those of scripts/serve.py.",
    )
    beside = Path(sys.executable).with_name("smg")
    add = parser.add_argument
    add("--http-host", default="127.0.0.1", help="where the gateway listens (default: %(default)s)")
    add("--http-port", type=int, default=30000, help="(default: %(default)s)")
    add("--http-metrics-port", type=int, default=29000, help="(default: %(default)s)")
    add(
        "--smg",
        default=str(beside) if beside.is_file() else "smg",
        metavar="FILE",
        help="the gateway's program (default: beside this Python, else in PATH)",
    )
    return parser


def gateway_command(args: argparse.Namespace, address: str) -> list[str]:
    """The gateway's command line.

    A served name such as Kimi-K3 selects the parsers by itself, with limits of the vendor's API;
    any other name needs them here.
    """
    return [
        *(args.smg, "launch", "--worker-urls", f"grpc://{address}", "--log-level", "warn"),
        *("--host", args.http_host, "--port", str(args.http_port)),
        *("--prometheus-host", args.http_host, "--prometheus-port", str(args.http_metrics_port)),
        *("--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3"),
        *("--health-check-interval-secs", "5"),
    ]


def stop(number: int, frame: FrameType | None) -> None:
    """Leave `main`, and with it both processes; later signals change nothing."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(0)


@contextlib.contextmanager
def child(*command: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process; on the way out it is told to end, and killed if it does not.

    It gets no Ctrl-C of the terminal: this program ends both in their order.
    """
    process = subprocess.Popen(command, stdout=stdout, text=True, process_group=0)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_server(server: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the line `ready ADDRESS model=NAME ...`, and return address and name."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if line.startswith("ready "):
            threading.Thread(target=pass_on, args=(server.stdout,), daemon=True).start()
            _, address, *words = line.split()
            return address, dict(word.split("=", 1) for word in words)["model"]
    raise StartError(f"the server ended with exit code {server.wait()}")


def wait_gateway(gateway: subprocess.Popen[str], url: str, model: str) -> None:
    """Wait until the gateway has the server and its tokenizer."""
    end_s = time.monotonic() + READY_S
    while not is_ready(url, model):
        check_runs(gateway, "the gateway")
        if time.monotonic() > end_s:
            raise StartError(f"the gateway is not ready after {READY_S:g} s")
        time.sleep(POLL_S)


def is_ready(url: str, model: str) -> bool:
    """Whether the gateway can answer for a model. It says so before it has the tokenizer."""
    try:
        get_json(f"{url}/readiness")  # an error status as long as there is no healthy server
        tokenizers = get_json(f"{url}/v1/tokenizers")["tokenizers"]
    except (OSError, http.client.HTTPException):
        return False
    return any(tokenizer["name"] == model for tokenizer in tokenizers)


def get_json(url: str) -> Any:
    """Fetch a JSON document."""
    with urllib.request.urlopen(url, timeout=5.0) as reply:
        return json.load(reply)


def pass_on(output: IO[str]) -> None:
    """Print what a process prints, until it ends."""
    with output:
        for line in output:
            print(line, end="", flush=True)


def check_runs(process: subprocess.Popen[str], name: str) -> None:
    """Raise an error if a process has ended."""
    if process.poll() is not None:
        raise StartError(f"{name} ended with exit code {process.returncode}")


if __name__ == "__main__":
    sys.exit(main())
