"""What a step moves between devices, per layer and scope: rows, totals, a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sharding.hlo import Collective

OUTSIDE = "outside"  # what belongs to no layer: embedding, head, result


class Links(NamedTuple):
    """Bytes that one rank sends over the links inside its host, and over the network."""

    inside: float
    network: float

    def __add__(self, other: Any) -> Links:
        return Links(self.inside + other.inside, self.network + other.network)

    def __mul__(self, factor: Any) -> Links:
        return Links(self.inside * factor, self.network * factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The collectives of one kind in one scope, in one layer.

    Attributes:
      layers: of the whole model that have them; 1 outside of layers.
      launches: in one layer.
      bytes_in, bytes_out, links: of one rank in one layer.
    """

    scope: str
    kind: str
    dtype: str
    ranks: int
    layers: int
    launches: int
    bytes_in: int
    bytes_out: int
    links: Links

    @property
    def in_step(self) -> Links:
        return self.links * self.layers


def links(collective: Collective, ranks_per_host: int) -> Links:
    """Bytes that one rank sends in one run.

    Inside a host a ring, or pairs. Between hosts in two levels: a reduction is scattered inside the
    host, crosses the network once with each rank's share, and is gathered inside; a gather and a
    scatter do one half of that. Everything for ranks of another host is sent there directly in an
    all-to-all.

    Raises:
      ValueError: hosts have different numbers of a group's ranks.
    """
    group = collective.groups[0]
    hosts = Counter(rank // ranks_per_host for rank in group)
    if len(set(hosts.values())) != 1:
        raise ValueError(
            f"ranks per host do not divide a group of {collective.name}: got {ranks_per_host}; "
            f"expected hosts with the same number of the ranks {group}"
        )
    size, near, far = len(group), hosts[group[0] // ranks_per_host], len(hosts)
    match collective.kind:
        case "all-reduce":
            payload = collective.bytes_in
            return Links(2 * (near - 1) / near, 2 * (far - 1) / far / near) * payload
        case "all-gather" | "reduce-scatter":
            payload = max(collective.bytes_in, collective.bytes_out)
            return Links((near - 1) / near, (far - 1) / size) * payload
        case "all-to-all" | "ragged-all-to-all":
            return Links((near - 1) / size, (size - near) / size) * collective.bytes_in
        case _:
            raise ValueError(f"links of {collective.kind} are unknown: got {collective.name}")


def rows(
    found: Iterable[Collective],
    kinds: Mapping[int, str],
    layers_of_kind: Mapping[str, int],
    ranks_per_host: int,
) -> list[Row]:
    """Group by scope, from one layer of each kind; what several kinds have alike is one row.

    Args:
      kinds: kind of each layer that `found` speaks of.
      layers_of_kind: how many the whole model has.
    """
    example = {kind: layer for layer, kind in kinds.items()}  # the last layer of each kind
    grouped: dict[tuple[str, str, str, str, int], list[Collective]] = {}
    for one in found:
        kind = OUTSIDE if one.layer is None else kinds[one.layer]
        if one.group_size == 1 or (one.layer is not None and one.layer != example[kind]):
            continue
        key = (kind, one.scope, one.kind, one.dtype, one.group_size)
        grouped.setdefault(key, []).append(one)
    merged: dict[Row, int] = {}
    for (kind, scope, op, dtype, ranks), members in grouped.items():
        row = Row(
            scope=scope,
            kind=op,
            dtype=dtype,
            ranks=ranks,
            layers=0,
            launches=len({one.name for one in members}) * members[0].times,
            bytes_in=sum(one.times * one.bytes_in for one in members),
            bytes_out=sum(one.times * one.bytes_out for one in members),
            links=sum(
                (links(one, ranks_per_host) * one.times for one in members), start=Links(0.0, 0.0)
            ),
        )
        merged[row] = merged.get(row, 0) + (1 if kind == OUTSIDE else layers_of_kind[kind])
    return [dataclasses.replace(row, layers=layers) for row, layers in merged.items()]


def total(table: Sequence[Row]) -> dict[str, float]:
    """Of a step and one rank: launches, and bytes sent."""
    sent = sum((row.in_step for row in table), start=Links(0.0, 0.0))
    crossing = sum(row.launches * row.layers for row in table if row.links.network)
    launches = sum(row.launches * row.layers for row in table)
    return {
        "launches_inside": launches - crossing,
        "launches_network": crossing,
        "inside_bytes": sent.inside,
        "network_bytes": sent.network,
    }


def text(table: Sequence[Row]) -> str:
    """All rows as a table; bytes in kB of one rank and layer, and in MB of one rank and step."""
    lines = [
        ("scope", "collective", "type", "ranks", "layers", "calls", "in kB", "out kB", "NVLink kB",
         "network kB", "NVLink MB/step", "network MB/step")
    ]  # fmt: skip
    for row in table:
        lines.append(
            (
                row.scope, row.kind, row.dtype, str(row.ranks), str(row.layers), str(row.launches),
                f"{row.bytes_in / 1e3:.1f}", f"{row.bytes_out / 1e3:.1f}",
                f"{row.links.inside / 1e3:.1f}", f"{row.links.network / 1e3:.1f}",
                f"{row.in_step.inside / 1e6:.2f}", f"{row.in_step.network / 1e6:.2f}",
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
