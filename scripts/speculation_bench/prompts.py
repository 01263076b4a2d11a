"""Texts to go on from: Python that can hardly go on but one way, and text that can in many.

All have at most `MAX_CHARS` characters, ASCII only: as many tokens of a byte tokenizer.
"""

from __future__ import annotations

import random
import string

MAX_CHARS = 256

# Tables, chains, constructors and headers: what comes next follows from what is there.
LOW_ENTROPY: tuple[str, ...] = (
    """\
class Point:
    def __init__(self, name, value, parent, children, start, end):
        self.name = name
        self.value = value
        self.parent = parent
        self.children = children
""",
    """\
        if kind == 'a':
            return 1
        elif kind == 'b':
            return 2
        elif kind == 'c':
            return 3
        elif kind == 'd':
            return 4
        elif kind == 'e':
""",
    """\
decoding_table = (
    '\\x00'     #  0x00 -> NULL
    '\\x01'     #  0x01 -> START OF HEADING
    '\\x02'     #  0x02 -> START OF TEXT
    '\\x03'     #  0x03 -> END OF TEXT
    '\\x04'     #  0x04 -> END OF TRANSMISSION
""",
    """\
class Codec(codecs.Codec):

    def encode(self,input,errors='strict'):
        return codecs.charmap_encode(input,errors,encoding_table)

    def decode(self,input,errors='strict'):
        return codecs.charmap_decode(input,errors,decoding_table)
""",
    """\
ERROR_00 = 0
ERROR_01 = 1
ERROR_02 = 2
ERROR_03 = 3
ERROR_04 = 4
ERROR_05 = 5
ERROR_06 = 6
ERROR_07 = 7
ERROR_08 = 8
ERROR_09 = 9
ERROR_10 = 10
ERROR_11 = 11
ERROR_12 = 12
""",
    """\
    table = [
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
""",
    """\
names = {
    'alpha': 'alpha',
    'beta': 'beta',
    'gamma': 'gamma',
    'delta': 'delta',
    'epsilon': 'epsilon',
    'zeta': 'zeta',
    'eta': 'eta',
    'theta': 'theta',
""",
    """\
    def visit_Add(self, node):
        self.generic_visit(node)

    def visit_Sub(self, node):
        self.generic_visit(node)

    def visit_Mult(self, node):
        self.generic_visit(node)

    def visit_Div(self, node):
""",
    """\
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless""",
    """\
# Permission to use, copy, modify, and distribute this software and its
# documentation for any purpose and without fee is hereby granted,
# provided that the above copyright notice appear in all copies and that
# both that copyright notice and this""",
    """\
import os
import sys
import time
import types
import warnings

__all__ = [
    "get_name", "set_name",
    "get_value", "set_value",
    "get_parent", "set_parent",
    "get_start", "set_start",
    "get_end", "set_end",
""",
    """\
# ----------------------------------------------------------------------
# ----------------------------------------------------------------------

#-----------------------------------------------------------------------
""",
    """\
        self.assertEqual(f(0), 0)
        self.assertEqual(f(1), 1)
        self.assertEqual(f(2), 2)
        self.assertEqual(f(3), 3)
        self.assertEqual(f(4), 4)
        self.assertEqual(f(5), 5)
        self.assertEqual(f(6), 6)
""",
    """\
    def __lt__(self, other):
        if not isinstance(other, Version):
            return NotImplemented
        return self.key < other.key

    def __le__(self, other):
        if not isinstance(other, Version):
            return NotImplemented
""",
    """\
        try:
            self.flush()
        except OSError:
            pass
        try:
            self.close()
        except OSError:
            pass
        try:
            self.stop()
        except OSError:
            pass
        try:
""",
    """\
    @property
    def width(self):
        return self._width

    @property
    def height(self):
        return self._height

    @property
    def length(self):
        return self._length

    @property
    def depth(self):
""",
)

# Prose and data of several kinds.
_VARIED: tuple[str, ...] = (
    "The harbour was quiet that evening, except for the gulls and a radio somewhere behind",
    "Dear Ms. Okafor,\n\nThank you for your letter of the 14th. I am afraid that",
    "Ingredients: 300 g flour, 2 eggs, a pinch of salt, 125 ml milk. First, ",
    "Q: Why do two mirrors that face each other not show an endless row of rooms?\nA: ",
    '{"id": "7f3c-91ab", "user": "kestrel42", "score": 17.625, "tags": ["blue", ',
    "2031-07-19T04:51:33Z WARN scheduler[8812] job 5f0e lost its lease after ",
    "def unusual(self, *args):\n    # Nobody remembers why, but on Thursdays ",
    "x = 0x5DEECE66D; y = 1181783497276652981; z = ",
)


def high_entropy(seed: int = 0) -> tuple[str, ...]:
    """Varied text, and as many texts of random names, words and numbers."""
    rng = random.Random(seed)

    def name() -> str:
        return "".join(rng.choices(string.ascii_letters + string.digits + "_", k=rng.randint(4, 9)))

    def line() -> str:
        return f"{name()} = {name()}({rng.randrange(10**6)}, {name()!r}) {rng.choice('+-*/%^')} "

    made = ("\n".join(line() for _ in range(4)) + name() for _ in _VARIED)
    return (*_VARIED, *(text[:MAX_CHARS] for text in made))
