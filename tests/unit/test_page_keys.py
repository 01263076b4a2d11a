"""Prefix keys against a direct reading of their definition, and what they must tell apart."""

from __future__ import annotations

import hashlib
import itertools
import random
import struct

import numpy as np
import pytest

from serving.page_table.keys import KEY_BYTES, chain_of, extend_chain, unit_keys

UNIT = 4
TOKENS = tuple(random.Random(1).randrange(163840) for _ in range(45))


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def int32(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


@pytest.mark.parametrize("lookahead", [0, 1, UNIT, 6])
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_keys_are_the_documented_hashes(salt: str, lookahead: int):
    parent = sha(b"k3jax prefix keys 1\0", struct.pack("<QQ", UNIT, lookahead), salt.encode())
    expected: list[bytes] = []
    for end in range(UNIT, len(TOKENS) - lookahead + 1, UNIT):
        parent = sha(parent, int32(TOKENS[end - UNIT : end]))
        ahead = int32(TOKENS[end : end + lookahead])
        expected.append(sha(parent, ahead, b"\1") if lookahead else parent)
    assert unit_keys(TOKENS, UNIT, salt=salt, lookahead=lookahead) == tuple(expected)


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_only_complete_units_have_keys(lookahead: int):
    for length in range(3 * UNIT + lookahead + 1):
        keys = unit_keys(TOKENS[:length], UNIT, lookahead=lookahead)
        assert len(keys) == max(0, length - lookahead) // UNIT
        assert all(len(key) == KEY_BYTES for key in keys)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_equal_prefixes_and_only_those_have_equal_keys(lookahead: int):
    keys = unit_keys(TOKENS, UNIT, lookahead=lookahead)
    for place in range(len(TOKENS)):
        changed = (*TOKENS[:place], TOKENS[place] + 1, *TOKENS[place + 1 :])
        others = unit_keys(changed, UNIT, lookahead=lookahead)
        for unit, (key, other) in enumerate(zip(keys, others, strict=True), start=1):
            assert (key == other) == (unit * UNIT + lookahead <= place)


def test_salts_units_and_lookaheads_have_no_key_in_common():
    tokens = (7,) * 24
    salts = ("", "a", "ab", "b", "\0", "a\0", "\x04", "ä")
    every = [
        unit_keys(tokens, unit, salt=salt, lookahead=lookahead)
        for salt, unit, lookahead in itertools.product(salts, (2, 4, 8), (0, 1, 2, 4))
    ]
    flat = [key for keys in every for key in keys]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("lookahead", [0, 1, UNIT, 7])
def test_a_grown_chain_equals_one_shot(lookahead: int):
    rng = random.Random(2)
    for _ in range(50):
        chain, length = chain_of("s", UNIT, lookahead), 0
        while length < len(TOKENS):
            length = min(len(TOKENS), length + rng.randrange(1, 14))
            chain = extend_chain(chain, TOKENS[chain.num_tokens : length])
            assert chain.keys == unit_keys(TOKENS[:length], UNIT, salt="s", lookahead=lookahead)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_key_comes_exactly_at_the_announced_length(lookahead: int):
    chain = chain_of("", UNIT, lookahead)
    lengths: list[int] = []
    for length in range(1, len(TOKENS) + 1):
        before = chain
        if length == chain.next_at:
            chain = extend_chain(chain, TOKENS[chain.num_tokens : length])
            lengths.append(length)
        else:
            assert extend_chain(chain, TOKENS[chain.num_tokens : length]) is chain
        assert len(chain.keys) - len(before.keys) == (length == before.next_at)
    assert lengths == list(range(UNIT + lookahead, len(TOKENS) + 1, UNIT))


def test_continuations_of_one_chain_do_not_disturb_it():
    stem = extend_chain(chain_of("", UNIT), TOKENS[:8])
    left = extend_chain(stem, (1, 2, 3, 4))
    right = extend_chain(stem, (5, 6, 7, 8))
    assert stem.keys == unit_keys(TOKENS[:8], UNIT)
    assert left.keys[:2] == right.keys[:2] == stem.keys
    assert left.keys[2] != right.keys[2]


def test_arrays_and_lists_have_the_keys_of_tuples():
    keys = unit_keys(TOKENS, UNIT)
    wide = np.array([TOKENS, TOKENS], dtype=np.int32).T
    assert unit_keys(np.array(TOKENS, dtype=np.int32), UNIT) == keys
    assert unit_keys(np.array(TOKENS, dtype=">i4"), UNIT) == keys
    assert unit_keys(wide[:, 0], UNIT) == keys  # not contiguous
    assert unit_keys(list(TOKENS), UNIT) == keys


def test_tokens_that_are_no_int32_are_refused():
    with pytest.raises(OverflowError):
        unit_keys((1 << 31,) * UNIT, UNIT)
    with pytest.raises(TypeError, match="int64"):
        unit_keys(np.zeros(UNIT, dtype=np.int64), UNIT)


@pytest.mark.parametrize(("unit", "lookahead", "name"), [(0, 0, "unit_tokens"), (4, -1, "look")])
def test_bad_sizes_are_named(unit: int, lookahead: int, name: str):
    with pytest.raises(ValueError, match=name):
        chain_of("", unit, lookahead)
