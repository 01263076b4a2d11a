"""What a compiled program moves between devices, and what its matrix products cost.

Reads HLO text (`sharding.hlo_text`), so that a test can state a closed form for the program that
really runs. All numbers are those of one rank and one run of the program. Never imports jax.

XLA:CPU carries bfloat16 collectives in float32. Given the text before optimisation as well, each
collective counts with the element type that the program asked for, as it runs on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from sharding.hlo_text import ArrayType, Instruction, Module, Site, parse

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
]
Groups = tuple[tuple[int, ...], ...]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_WIDENED = {"f32", "bf16", "f16"}  # what a collective of f32 may have been before optimisation
_LAYER = re.compile(r"layer_(\d+)")
_LIBRARY_PRODUCT = re.compile(r'custom_call_target="[^"]*(gemm|matmul|dot)[^"]*"', re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective, or the part of a combined one that belongs to one scope.

    Attributes:
      name: of the instruction; the parts of a combined one share it.
      layer: index in the scope `layer_N`, or None outside of layers.
      scope: scopes inside the layer, joined by slashes.
      bytes_in, bytes_out: payload of one run that this rank gives and gets. What a ragged exchange
        really sends depends on the data: these are the sizes of its buffers.
      groups: ranks that take part together; pairs of source and target for a permutation.
      times: runs of the instruction in a run of the program.
    """

    name: str
    kind: Kind
    layer: int | None
    scope: str
    dtype: str
    bytes_in: int
    bytes_out: int
    groups: Groups
    channel: int | None
    times: int

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    @property
    def link_bytes(self) -> float:
        """Bytes that this rank sends in one run, as the usual ring or pairwise algorithms do.

        An all-reduce of B bytes over n ranks sends 2 (n - 1) / n B; an all-gather that yields B
        bytes, a reduce-scatter and an all-to-all of B bytes send (n - 1) / n B.
        """
        others = (self.group_size - 1) / self.group_size
        match self.kind:
            case "all-reduce":
                return 2 * others * self.bytes_in
            case "all-gather":
                return others * self.bytes_out
            case "collective-permute":
                return float(self.bytes_in)
            case _:
                return others * self.bytes_in


def collectives(
    text: str, *, lowered: str | None = None, trips: Mapping[str, int] | None = None
) -> list[Collective]:
    """Every collective of a program, in the order of the text.

    Args:
      text: the program, usually after optimisation.
      lowered: the same program before optimisation; see the module's description.
      trips: how often to count branches, and loops whose length the text does not tell, by their
        scope; 0 leaves their collectives out.

    Raises:
      ValueError: a collective is in another branch or such loop, or is not understood.
    """
    module = parse(text)
    asked = _asked_dtypes(parse(lowered)) if lowered else {}
    found = []
    for site in module.sites():
        kind = _kind(site.instruction)
        if kind is not None:
            found += _parts(site, kind, module, asked, trips or {})
    return [one for one in found if one.times]


def dot_flops(
    text: str, *, layer: int | None = None, scope: str = ""
) -> dict[tuple[int | None, str], int]:
    """Floating-point operations of matrix products by layer and scope: two for a multiply-add.

    Args:
      layer: only products of this layer.
      scope: only products of this scope and those inside it.

    Raises:
      ValueError: such a product is in a branch or in a loop of unknown length, or hidden in a
        library call.
    """
    totals: dict[tuple[int | None, str], int] = {}
    for site in parse(text).sites():
        instruction = site.instruction
        is_hidden = instruction.opcode == "custom-call" and _LIBRARY_PRODUCT.search(
            instruction.attributes
        )
        if instruction.opcode != "dot" and not is_hidden:
            continue
        where = _where(instruction.path)
        if layer is not None and where[0] != layer:
            continue
        if scope and where[1] != scope and not where[1].startswith(scope + "/"):
            continue
        if is_hidden:
            raise ValueError(
                f"matrix product {instruction.name} is a library call: its size is not in the text"
            )
        totals[where] = totals.get(where, 0) + _times(site, {}) * _dot_flops(site)
    return totals


def _kind(instruction: Instruction) -> Kind | None:
    """The kind of collective that an instruction starts.

    Raises:
      ValueError: it is a collective of another kind.
    """
    name = instruction.opcode.removesuffix("-start")
    for kind in _KINDS:
        if name == kind:
            return kind
    if name.startswith(("collective-", "all-", "send", "recv")) and not name.endswith("-done"):
        raise ValueError(
            f"collective {instruction.name} is not understood: got {instruction.opcode}; expected "
            f"one of {', '.join(_KINDS)}"
        )
    return None


def _parts(
    site: Site,
    kind: Kind,
    module: Module,
    asked: Mapping[tuple[str, ...], set[str]],
    trips: Mapping[str, int],
) -> Iterator[Collective]:
    """What a collective carries, by scope and element type."""
    instruction, arrays = site.instruction, site.operand_arrays
    groups = _groups(instruction, kind, module.num_partitions)
    channel = instruction.attribute("channel_id")
    sizes: dict[tuple[int | None, str, str], int] = {}
    for position, array in enumerate(arrays[:1] if kind == "ragged-all-to-all" else arrays):
        origin = _origin(site, position)
        dtype = _asked_dtype(asked, kind, origin, array)
        key = (*_where(origin), dtype)
        sizes[key] = sizes.get(key, 0) + ArrayType(dtype, array.dims).num_bytes
    for (layer, scope, dtype), bytes_in in sizes.items():
        bytes_out = bytes_in
        if kind == "all-gather":
            bytes_out = bytes_in * len(groups[0])
        elif kind == "reduce-scatter":
            bytes_out = bytes_in // len(groups[0])
        yield Collective(
            name=instruction.name, kind=kind, layer=layer, scope=scope, dtype=dtype,
            bytes_in=bytes_in, bytes_out=bytes_out, groups=groups,
            channel=int(channel) if channel else None, times=_times(site, trips),
        )  # fmt: skip


def _origin(site: Site, position: int) -> tuple[str, ...]:
    """The path of one operand of a collective, which may have been combined."""
    collective = site.instruction
    for user in site.computation.values():
        if (
            user.opcode == "get-tuple-element"
            and user.operands == (collective.name,)
            and user.attribute("index") == str(position)
            and user.path in collective.paths
        ):
            return user.path
    paths = collective.paths
    return paths[position] if len(paths) == len(collective.operands) else paths[0]


def _asked_dtypes(module: Module) -> dict[tuple[str, ...], set[str]]:
    """Element types of the collectives before optimisation, by kind and path."""
    asked: dict[tuple[str, ...], set[str]] = {}
    for computation in module.computations.values():
        for instruction in computation.values():
            kind = _kind(instruction)
            if kind is not None:
                dtype = instruction.arrays[0].dtype
                asked.setdefault((kind, *instruction.path), set()).add(dtype)
    return asked


def _asked_dtype(
    asked: Mapping[tuple[str, ...], set[str]], kind: Kind, origin: tuple[str, ...], array: ArrayType
) -> str:
    """The element type that the program asked for.

    Raises:
      ValueError: a widened array could be one of several.
    """
    dtypes = asked.get((kind, *origin), set()) & _WIDENED
    if array.dtype != "f32" or not dtypes:
        return array.dtype
    if len(dtypes) > 1:
        raise ValueError(
            f"element type of {kind} at {'/'.join(origin)} is ambiguous: got {sorted(dtypes)}; "
            "expected one"
        )
    return next(iter(dtypes))


def _where(path: tuple[str, ...]) -> tuple[int | None, str]:
    """Layer and scope of a path."""
    scopes = path[:-1]
    for i, name in enumerate(scopes):
        match = _LAYER.fullmatch(name)
        if match:
            return int(match[1]), "/".join(scopes[i + 1 :])
    return None, "/".join(scopes)


def _times(site: Site, trips: Mapping[str, int]) -> int:
    """How often an instruction runs.

    Raises:
      ValueError: neither the text nor `trips` tells.
    """
    if site.times is not None:
        return site.times
    assert site.inside is not None
    scope = _where(site.inside.path)[1]
    if scope in trips:
        return trips[scope]
    raise ValueError(
        f"{site.instruction.name} runs an unknown number of times: it is inside {site.inside.name} "
        f"({site.inside.opcode}, scope {scope!r}); expected a loop of known length"
    )


def _groups(instruction: Instruction, kind: Kind, num_partitions: int) -> Groups:
    """Ranks that take part together.

    Raises:
      ValueError: the notation is not understood, or groups differ in size.
    """
    name = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    text = instruction.attribute(name) or ""
    if iota := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, reshape, transpose = (_ints(part) for part in iota.groups())
        ids = np.arange(math.prod(reshape)).reshape(reshape)
        table = ids.transpose(transpose or range(ids.ndim)).reshape(shape)
    elif mesh := re.fullmatch(r"mesh\[(.*)\] \{(.*)\}", text):
        axes = [part.partition("=") for part in mesh[1].split(",")]
        names = [name for name, _, _ in axes]
        taken = [names.index(part.strip()) for part in mesh[2].split(",")]
        order = [i for i in range(len(names)) if i not in taken] + taken
        ids = np.arange(math.prod(int(size) for _, _, size in axes))
        ids = ids.reshape([int(size) for _, _, size in axes]).transpose(order)
        table = ids.reshape(-1, math.prod(ids.shape[len(names) - len(taken) :]))
    elif re.fullmatch(r"\{(\{[\d,]+\},?)*\}", text):
        listed = [_ints(part) for part in re.findall(r"\{([\d,]+)\}", text)]
        table = listed or [list(range(num_partitions))]
    else:
        raise ValueError(f"{name} of {instruction.name} is not understood: got {text!r}")
    groups = tuple(tuple(int(rank) for rank in group) for group in table)
    if len({len(group) for group in groups}) != 1:
        raise ValueError(f"groups of {instruction.name} differ in size: got {text}")
    return groups


def _dot_flops(site: Site) -> int:
    left = site.operand_arrays[0]
    contracted = _ints(site.instruction.attribute("lhs_contracting_dims"))
    return (
        2
        * math.prod(site.instruction.arrays[0].dims)
        * math.prod(left.dims[dim] for dim in contracted)
    )


def _ints(text: str | None) -> Sequence[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]
