"""Reading the HLO text of a program: instructions, and how often each one runs.

Takes the text that `jax.stages.Compiled.as_text()` and
`jax.stages.Lowered.as_text(dialect="hlo", debug_info=True)` return. Never imports jax.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BITS: Mapping[str, int] = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) *(\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED: Mapping[str, str] = {
    "fusion": "calls",
    "async-start": "calls",
    "call": "to_apply",
    "while": "body",
    "conditional": "branch_computations|true_computation|false_computation",
}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MERGED = re.compile(r"\(([^():]*(?::[^():]*)+)\)")
# Parts of an `op_name` that are no scope of the program's own.
_NO_SCOPE = re.compile(
    r"(jit|pjit)\(.*\)|shard_map|while|body|cond|closed_call|eval_jaxpr|branch_.*|.*(,|->).*"
)


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """Element type and dims of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = _BITS.get(self.dtype) or int(re.findall(r"\d+", self.dtype)[0])
        return -(-math.prod(self.dims) * bits // 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      arrays: of its result; a tuple is flattened.
      operands: names, in order.
      attributes: the text behind the operands.
    """

    name: str
    opcode: str
    arrays: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Scopes of the program that this instruction belongs to, then the operation's name.

        One path, unless operations of several scopes were combined: `moe/(tail/psum:shared/psum)`.
        """
        match = _OP_NAME.search(self.attributes)
        name = match[1] if match else ""
        merged = _MERGED.search(name)
        names = [name]
        if merged:
            before, after = name[: merged.start()], name[merged.end() :]
            names = [before + part + after for part in merged[1].split(":")]
        return tuple(_path(name) for name in names)

    @property
    def path(self) -> tuple[str, ...]:
        """The first of `paths`."""
        return self.paths[0]

    def attribute(self, name: str) -> str | None:
        """The value of an attribute, up to the comma behind it."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        if match is None:
            return None
        text = self.attributes[match.end() :]
        return text[: _end_of_item(text)]


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An instruction in its place.

    Attributes:
      times: how often it runs in a run of the program; None if it is in a loop of unknown length
        or in a branch.
      inside: the innermost loop or branch that the count is not known of.
    """

    instruction: Instruction
    computation: Computation
    times: int | None
    inside: Instruction | None

    @property
    def operand_arrays(self) -> tuple[ArrayType, ...]:
        """Arrays of all operands."""
        names = self.instruction.operands
        return tuple(array for name in names for array in self.computation[name].arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A program.

    Attributes:
      num_partitions: devices that run it, as far as the text tells; else 1.
    """

    entry: str
    computations: Mapping[str, Computation]
    num_partitions: int

    def sites(self) -> Iterator[Site]:
        """Every instruction that a run may reach, once for each place that calls it."""
        yield from self._walk(self.entry, 1, None)

    def _walk(self, name: str, times: int | None, inside: Instruction | None) -> Iterator[Site]:
        computation = self.computations[name]
        for instruction in computation.values():
            yield Site(instruction, computation, times, inside)
            attributes = _CALLED.get(instruction.opcode)
            if attributes is None:
                continue
            called = [
                target
                for attribute in attributes.split("|")
                for target in re.findall(r"[\w.\-]+", instruction.attribute(attribute) or "")
            ]
            trips, unknown = _trips(instruction), inside
            if trips is None:
                unknown = instruction
            product = None if times is None or trips is None else times * trips
            for target in called:
                yield from self._walk(target, product, unknown)


@functools.lru_cache(maxsize=4)
def parse(text: str) -> Module:
    """Read a module.

    Raises:
      ValueError: the text is no HLO module, or an instruction is not understood.
    """
    if not text.startswith("HloModule"):
        raise ValueError(f"text is no HLO module: got {text[:40]!r}; expected 'HloModule ...'")
    header = text.partition("\n")[0]
    partitions = re.search(r"num_partitions=(\d+)", header)
    entry = None
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    for line in text.splitlines()[1:]:
        if line.startswith("}"):
            current = None
        elif current is None:
            match = _COMPUTATION.match(line)
            if match:
                current = computations.setdefault(match[2], {})
                entry = match[2] if match[1] else entry
        elif line.strip():
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("HLO module has no entry: expected a computation marked ENTRY")
    return Module(entry, computations, int(partitions[1]) if partitions else 1)


def _path(op_name: str) -> tuple[str, ...]:
    *scopes, operation = op_name.split("/")
    return (*(scope for scope in scopes if not _NO_SCOPE.fullmatch(scope)), operation)


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(f"HLO instruction is not understood: got {line.strip()[:80]!r}")
    rest = re.sub(r"/\*.*?\*/", "", line[match.end() :])
    if rest.startswith("("):
        shape, rest = rest[: _closing(rest)], rest[_closing(rest) :].lstrip()
    else:
        shape, _, rest = rest.partition(" ")
    opcode, _, _ = rest.partition("(")
    rest = rest[len(opcode) :]
    inner, attributes = rest[1 : _closing(rest) - 1], rest[_closing(rest) :].removeprefix(", ")
    arrays = tuple(
        ArrayType(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(shape)
    )
    operands: tuple[str, ...] = ()
    if opcode not in ("constant", "parameter"):
        operands = tuple(_items(inner))
    return Instruction(match[1], opcode, arrays, operands, attributes)


def _items(text: str) -> Iterator[str]:
    """Names of comma-separated operands, which may have their types before them."""
    while text:
        end = _end_of_item(text)
        yield text[:end].split(" ")[-1].removeprefix("%")
        text = text[end:].removeprefix(",").lstrip()


def _end_of_item(text: str) -> int:
    """Index of the first comma outside brackets and strings, or the length."""
    depth, quoted = 0, False
    for i, char in enumerate(text):
        if char == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == "," and depth == 0:
            return i
    return len(text)


def _closing(text: str) -> int:
    """Index behind the parenthesis that closes the first one."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"HLO text has an open parenthesis: got {text[:80]!r}")


def _trips(instruction: Instruction) -> int | None:
    """How often an instruction runs what it calls; None if the text does not tell."""
    if instruction.opcode == "while":
        match = _TRIPS.search(instruction.attributes)
        return int(match[1]) if match else None
    return None if instruction.opcode == "conditional" else 1
