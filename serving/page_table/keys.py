"""Prefix keys: one SHA-256 a unit of tokens, chained, so that a key names a whole prefix.

`chain(i) = H(chain(i-1), tokens of unit i)`, with the tokens as little-endian int32. The parent of
unit 0 is a seed that covers the unit length, the lookahead and the salt; it is the same in every
process (cache-semantics.md section 3). Without lookahead the key of unit i is `chain(i)`. With a
lookahead of L it is `H(chain(i), the next L tokens, 1)` and exists only once those are known.

No two inputs are hashed as the same bytes: numbers and hashes have a fixed width, the salt is the
last part of the seed, and the input of a lookahead key is one byte longer than any of the chain.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

type Tokens = Sequence[int] | Int32[np.ndarray, " T"]

KEY_BYTES = 32
_TOKEN_BYTES = 4
_SEED_DOMAIN = b"k3jax prefix keys 1\0"
_LOOKAHEAD_MARK = b"\1"


class KeyChain(NamedTuple):
    """The keys of a sequence so far, and what is needed to go on. A value: sequences may share it.

    Attributes:
      keys: of units 0, 1, ..., `KEY_BYTES` each; key i names the first `(i + 1) * unit_tokens`
        tokens.
      parent: `chain` of the last unit in `keys`, or the seed.
      lookahead: tokens after a unit that its key covers too.
    """

    keys: tuple[bytes, ...]
    parent: bytes
    unit_tokens: int
    lookahead: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the keys name; `extend_chain` goes on from this position."""
        return len(self.keys) * self.unit_tokens

    @property
    def next_at(self) -> int:
        """Length of the sequence at which the next key comes to be; shorter ones add nothing."""
        return self.num_tokens + self.unit_tokens + self.lookahead


def chain_of(salt: str, unit_tokens: int, lookahead: int = 0) -> KeyChain:
    """The chain of an empty sequence.

    Args:
      salt: sequences with different salts have no key in common.

    Raises:
      ValueError: `unit_tokens` or `lookahead` is out of range.
    """
    if unit_tokens < 1:
        raise ValueError(f"unit_tokens is out of range: got {unit_tokens}; expected >= 1")
    if lookahead < 0:
        raise ValueError(f"lookahead is out of range: got {lookahead}; expected >= 0")
    numbers = struct.pack("<QQ", unit_tokens, lookahead)
    seed = hashlib.sha256(_SEED_DOMAIN + numbers + salt.encode("utf-8", "surrogatepass")).digest()
    return KeyChain((), seed, unit_tokens, lookahead)


def extend_chain(chain: KeyChain, tokens: Tokens) -> KeyChain:
    """Add the keys of all units that are complete.

    A loop that adds a token at a time calls this when the sequence has `chain.next_at` tokens; the
    time is then that of one unit.

    Args:
      tokens: of the sequence from position `chain.num_tokens` on. Those that complete no key are
        not kept; they come again with the next call.
    """
    unit, lookahead = chain.unit_tokens, chain.lookahead
    count = (len(tokens) - lookahead) // unit
    if count < 1:
        return chain
    data = _token_bytes(tokens[: count * unit + lookahead])
    step = unit * _TOKEN_BYTES
    sha256, parent = hashlib.sha256, chain.parent
    keys: list[bytes] = []
    for end in range(step, (count + 1) * step, step):
        parent = sha256(parent + data[end - step : end]).digest()
        if lookahead:
            ahead = data[end : end + lookahead * _TOKEN_BYTES]
            keys.append(sha256(parent + ahead + _LOOKAHEAD_MARK).digest())
        else:
            keys.append(parent)
    return KeyChain((*chain.keys, *keys), parent, unit, lookahead)


def unit_keys(
    tokens: Tokens, unit_tokens: int, *, salt: str = "", lookahead: int = 0
) -> tuple[bytes, ...]:
    """Keys of all complete units of a sequence; see the module.

    Returns:
      One key of `KEY_BYTES` a unit: `max(0, (len(tokens) - lookahead) // unit_tokens)`.
    """
    return extend_chain(chain_of(salt, unit_tokens, lookahead), tokens).keys


def _token_bytes(tokens: Tokens) -> bytes:
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<i4", casting="safe", copy=False).tobytes()
    ids = array.array("i", tokens)  # faster than through NumPy
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
