"""Converters of option values that check them; argparse shows what they raise."""

from __future__ import annotations

import argparse
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping

_UNITS: Mapping[str, int] = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def number[N: (int, float)](
    kind: Callable[[str], N], *, at_least: float, at_most: float = math.inf
) -> Callable[[str], N]:
    """A converter that checks the range."""
    expected = f">= {at_least:g}" if at_most == math.inf else f"{at_least:g} to {at_most:g}"

    def convert(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not at_least <= value <= at_most:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a number {expected}")
        return kind(text)

    return convert


def byte_size(text: str) -> int:
    """Parse `1500`, `512M` or `64GiB`."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)(iB)?", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a size such as 512M or 64GiB")
    return int(match[1]) * _UNITS[match[2]]


def endpoint(text: str) -> str:
    """Check `HOST:PORT`, or `https://HOST:PORT`."""
    host_port = text.removeprefix("https://")
    try:
        url = urllib.parse.urlsplit(f"//{host_port}")
        is_right = url.hostname and url.port and url.netloc == host_port
    except ValueError:
        is_right = False
    if not is_right:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected HOST:PORT, or https://HOST:PORT")
    return text
