"""Ask a server to continue a prompt, and print the text as it comes.

Tokens travel as ids: the prompt is encoded and the answer decoded here, with the tokenizer that the
server hands out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import grpc

from serving.rpc.protocol import Stub, common, messages
from serving.stopping import StopCutter
from serving.tokenizer import Detokenizer, Tokenizer, TokenizerError, load_zip

LOOKUP_TIMEOUT_S = 30.0


class ClientError(Exception):
    """The answer could not be had; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Print the answer to a prompt and return the exit code."""
    args = build_parser().parse_args(argv)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        with open_channel(args) as channel:
            run(Stub(channel), args)
    except (ClientError, TokenizerError) as error:
        print(f"client.py: error: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"client.py: error: {explain(error, args.address)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The options of the client."""
    parser = argparse.ArgumentParser(prog="client.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("prompt", help="text to continue; - reads it from stdin")
    add("--address", default="127.0.0.1:50051", help="of the server (default: %(default)s)")
    add("--max-tokens", type=int, metavar="N", help="at most N new tokens (default: all that fit)")
    add(
        "--temperature",
        type=float,
        help="0 always takes the likeliest token (default: the model's)",
    )
    add("--top-p", type=float, help="probability mass to sample from (default: 1)")
    add("--top-k", type=int, help="candidates to sample from (default: all)")
    add("--seed", type=int, help="the same seed gives the same answer (default: random)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer in front of this text; may be given several times",
    )
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    add("--request-id", default=uuid.uuid4().hex, help="(default: random)")
    add("--ca", type=Path, metavar="FILE", help="PEM certificates to trust: connect over TLS")
    add("--cert", type=Path, metavar="FILE", help="PEM certificate to show to the server")
    add("--key", type=Path, metavar="FILE", help="PEM key of --cert")
    add("--timeout", type=float, metavar="S", help="give up after S seconds (default: never)")
    add(
        "--stats",
        action="store_true",
        help="print token counts, reused ones too, and times to stderr at the end",
    )
    return parser


def open_channel(args: argparse.Namespace) -> grpc.Channel:
    """Connect, over TLS if a certificate was given.

    Raises:
      ClientError: a file cannot be read.
    """
    options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    if args.ca is None and args.cert is None and args.key is None:
        return grpc.insecure_channel(args.address, options=options)
    try:
        ca, key, cert = (path and path.read_bytes() for path in (args.ca, args.key, args.cert))
    except OSError as error:
        raise ClientError(f"{error.filename} cannot be read: {error.strerror}") from error
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.secure_channel(args.address, credentials, options=options)


def run(stub: Stub, args: argparse.Namespace) -> None:
    """Ask, and print what comes.

    Raises:
      ClientError, TokenizerError, grpc.RpcError: the answer could not be had.
    """
    tokenizer = fetch_tokenizer(stub)
    info = stub.GetModelInfo(messages.GetModelInfoRequest(), timeout=LOOKUP_TIMEOUT_S)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    request = build_request(args, tokenizer.encode(text))
    begin_s = time.monotonic()
    first_s, num_tokens, end = None, 0, None
    detokenizer, cutter = Detokenizer(tokenizer, skip=info.eos_token_ids), StopCutter(args.stop)
    for reply in stub.Generate(request, timeout=args.timeout):
        if reply.HasField("chunk"):
            first_s = first_s or time.monotonic() - begin_s
            num_tokens += len(reply.chunk.token_ids)
            text = cutter.push(detokenizer.push(reply.chunk.token_ids))
            print(text, end="", flush=True)
        else:
            end = reply.complete
    print(cutter.push(detokenizer.finish()) + cutter.finish(), flush=True)
    if end is None:
        raise ClientError("the stream ended without its last message; see the server's log")
    if args.stats:
        print(
            f"finish_reason={end.finish_reason} prompt_tokens={end.prompt_tokens} "
            f"completion_tokens={num_tokens} cached_tokens={end.cached_tokens} "
            f"first_token_s={first_s or 0:.3f} total_s={time.monotonic() - begin_s:.3f}",
            file=sys.stderr,
        )


def build_request(args: argparse.Namespace, token_ids: list[int]) -> messages.GenerateRequest:
    """The request; options that were not given stay unset, and the server chooses."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        return messages.GenerateRequest(
            request_id=args.request_id,
            tokenized=messages.TokenizedInput(input_ids=token_ids),
            sampling_params=messages.SamplingParams(**given),
            stream=True,
        )
    except ValueError as error:  # a number that the field cannot hold
        raise ClientError(f"an option is out of range: {error}") from error


def fetch_tokenizer(stub: Stub) -> Tokenizer:
    """Get the tokenizer from the server."""
    chunks = list(stub.GetTokenizer(common.GetTokenizerRequest(), timeout=LOOKUP_TIMEOUT_S))
    data = b"".join(chunk.data for chunk in chunks)
    if not chunks or hashlib.sha256(data).hexdigest() != chunks[-1].sha256:
        raise ClientError(f"the tokenizer is damaged: {len(data)} bytes do not have their checksum")
    tokenizer = load_zip(data)
    if tokenizer is None:
        raise ClientError("the server's tokenizer is of no kind that this client reads")
    return tokenizer


def explain(error: grpc.RpcError, address: str) -> str:
    """One line about a failed call."""
    code, details = error.code(), " ".join(error.details().split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the answer took longer than --timeout allows ({details})"
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
        return f"no server answers at {address}; start one with `make serve`"
    return f"{code.name}: {details}"


if __name__ == "__main__":
    sys.exit(main())
