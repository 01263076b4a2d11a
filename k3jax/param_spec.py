"""How a parameter is described: shape, dtype, logical axes, the checkpoint tensors that fill it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Init = Literal["normal", "ones", "zeros", "a_log", "bytes"]
# How a checkpoint tensor becomes the described block.
Convert = Literal[
    "none",
    "squeeze_conv",  # [ND, 1, X] -> [ND, X]
    "squeeze_row",  # [1, H] -> [H]
    "a_log",  # [heads], [1, 1, heads, 1] or a zero-padded longer vector -> [heads]
]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor that fills `leaf[layer][index]`.

    Attributes:
      name: without the family's prefix; `{layer}` is the 0-based layer, `{expert}` the expert.
      index: position inside one layer's block. None stands for the expert.
    """

    name: str
    index: tuple[int | None, ...] = ()
    convert: Convert = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class ParamSpec:
    """One leaf of the parameter tree.

    Attributes:
      shape: global shape, the stack axis included.
      dtype: `compute` follows the run's dtype; the others are fixed.
      axes: logical axis of each dim, or None where it is never split. Names: vocab, heads, ff,
        expert, expert_ff.
      layers: model layers on the stack axis; empty for a leaf without one.
      sources: checkpoint tensors that fill one layer (or the leaf); together they cover it exactly
        once.
      init: distribution for random weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    layers: tuple[int, ...] = ()
    dtype: Literal["compute", "float32", "uint8"] = "compute"
    init: Init = "normal"


ParamTree = Mapping[str, Mapping[str, ParamSpec]]


def matrix(
    layers: tuple[int, ...], name: str, out: tuple[int, str | None], inp: tuple[int, str | None]
) -> ParamSpec:
    """A stacked `[Z, out, in]` matrix from one tensor a layer."""
    return ParamSpec(
        shape=(len(layers), out[0], inp[0]),
        axes=(None, out[1], inp[1]),
        layers=layers,
        sources=(Source(name),),
    )


def vector(
    layers: tuple[int, ...],
    name: str,
    size: int,
    *,
    axis: str | None = None,
    dtype: Literal["compute", "float32"] = "compute",
    init: Init = "ones",
    convert: Convert = "none",
) -> ParamSpec:
    """A stacked `[Z, size]` vector from one tensor a layer."""
    return ParamSpec(
        shape=(len(layers), size),
        axes=(None, axis),
        layers=layers,
        dtype=dtype,
        init=init,
        sources=(Source(name, convert=convert),),
    )


def glu(
    layers: tuple[int, ...], module: str, width: int, ff: int, *, prefix: str
) -> dict[str, ParamSpec]:
    """Gate, up and down of a dense or shared feed-forward network."""
    z, name = len(layers), f"{prefix}{module}."
    return {
        "gate_up": ParamSpec(
            shape=(z, 2, ff, width),
            axes=(None, None, "ff", None),
            layers=layers,
            sources=(
                Source(name + "gate_proj.weight", (0,)),
                Source(name + "up_proj.weight", (1,)),
            ),
        ),
        "down": matrix(layers, name + "down_proj.weight", (width, None), (ff, "ff")),
    }
