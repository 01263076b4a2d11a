"""Names of a checkpoint: which stored tensor fills which part of which leaf (k3-model.md section
3).

A checkpoint is accepted only if every described source exists exactly once, with the right shape
and a dtype that converts without loss, and nothing else is left over but the documented skips.
Headers are enough to decide that, so it is decided before a weight is read, and all problems are
reported at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from k3jax.config import Dtype, ModelConfig
from k3jax.params import ParamSpec, Source, a_log_stored, describe
from k3jax.weights.errors import Problem, raise_if_any
from k3jax.weights.safetensors_file import TensorEntry, duplicate

_LAYER = re.compile(r"layers\.(\d+)\.")

# Stored dtypes that convert without loss. `weight_scale` is E8M0 whatever its label (KF-L03).
_LOSSLESS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("BF16",),
    "float32": ("F32", "BF16", "F16"),
    "uint8": ("U8",),
}
_SCALE_DTYPES = ("U8", "F8_E8M0")


@dataclasses.dataclass(frozen=True, slots=True)
class BoundSource:
    """A described source with the stored tensors that fill it.

    Attributes:
      entries: one a layer, or one a layer and expert with the expert running fastest.
      num_experts: 1 for a source without experts.
    """

    source: Source
    entries: tuple[TensorEntry, ...]
    num_experts: int

    def entry(self, layer_idx: int, expert: int) -> TensorEntry:
        """The tensor of the `layer_idx`-th layer of the stack, and of one expert (0 if there are
        none)."""
        return self.entries[layer_idx * self.num_experts + expert]


# module name -> parameter name -> its sources
Bound = Mapping[str, Mapping[str, tuple[BoundSource, ...]]]


def bind(tensors: Mapping[str, TensorEntry], cfg: ModelConfig, dtype: Dtype) -> Bound:
    """Find the stored tensors of every source.

    Args:
      tensors: from `folder.open_checkpoint`.
      cfg: with the checkpoint's expert format.
      dtype: that leaves of dtype `compute` will have.

    Raises:
      WeightError: with every tensor that is missing, unknown, there twice, of a wrong shape, or of
        a dtype that would lose precision.
    """
    problems: list[Problem] = []
    by_name: dict[str, TensorEntry] = {}
    for stored, entry in tensors.items():
        name = canonical_name(stored, cfg)
        if name in by_name:
            problems.append(duplicate(stored, by_name[name], entry))
        elif name is not None:
            by_name[name] = entry
    bound: dict[str, dict[str, tuple[BoundSource, ...]]] = {}
    for module, params in describe(cfg).items():
        bound[module] = {
            name: tuple(
                _bind_source(by_name, cfg, dtype, spec, source, problems) for source in spec.sources
            )
            for name, spec in params.items()
        }
    # What was bound has been taken out of `by_name`.
    problems += [
        Problem(
            kind="unknown_tensor",
            file=entry.file.name,
            tensor=entry.name,
            message=f"{entry.file} holds tensor {entry.name}, which this model does not have; "
            "the configuration does not belong to this checkpoint",
        )
        for entry in by_name.values()
    ]
    raise_if_any(problems)
    return bound


def canonical_name(stored: str, cfg: ModelConfig) -> str | None:
    """A stored name without the family's prefix, or None for a tensor that this text model skips.

    Some exports say `language_model.layers.` for `language_model.model.layers.` (k3-model.md
    section 3.4). A name without the prefix is returned whole: no source has such a name, so it is
    reported as unknown.
    """
    name = stored
    if cfg.family == "kimi_k3":
        if stored.startswith(("vision_tower.", "mm_projector.")):
            return None
        if not stored.startswith("language_model."):
            return stored
        name = stored.removeprefix("language_model.")
        if name == "lm_head.weight":
            return name
    elif name == "lm_head.weight":
        return name
    elif not name.startswith("model."):
        return stored
    name = name.removeprefix("model.")
    if name == "lm_head.weight":
        return stored
    layer = _LAYER.match(name)
    if name.startswith("mtp") or (layer is not None and int(layer[1]) >= cfg.num_layers):
        return None
    return name


def released_name(name: str, cfg: ModelConfig) -> str:
    """The name under which a source is released: `canonical_name` undoes it."""
    inner = name if name == "lm_head.weight" else f"model.{name}"
    return f"language_model.{inner}" if cfg.family == "kimi_k3" else inner


def stored_shapes(spec: ParamSpec, source: Source, cfg: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Shapes that a source's tensors may have in a file, the released one first."""
    shape = spec.shape[num_leading_dims(spec) :]
    match source.convert:
        case "none":
            return (shape,)
        case "squeeze_conv":
            return ((shape[0], 1, shape[1]),)
        case "squeeze_row":
            return ((1, shape[0]),)
        case "a_log":
            plain = [shape, (1, 1, shape[0], 1)]
            stored = (a_log_stored(cfg),)
            if cfg.family == "kimi_linear":
                plain.reverse()
            return tuple(dict.fromkeys([stored, *plain] if stored != shape else plain))


def num_leading_dims(spec: ParamSpec) -> int:
    """Dims of a leaf in front of those of one stored tensor: the stack, and the positions inside a
    layer."""
    return bool(spec.layers) + len(spec.sources[0].index)


def _bind_source(
    by_name: dict[str, TensorEntry],
    cfg: ModelConfig,
    dtype: Dtype,
    spec: ParamSpec,
    source: Source,
    problems: list[Problem],
) -> BoundSource:
    """Take a source's tensors out of `by_name`, and check each."""
    experts = cfg.num_experts if None in source.index else 1
    shapes = stored_shapes(spec, source, cfg)
    dtypes = _LOSSLESS[dtype if spec.dtype == "compute" else spec.dtype]
    if source.name.endswith(".weight_scale"):
        dtypes = _SCALE_DTYPES
    entries: list[TensorEntry] = []
    for layer in spec.layers or (0,):
        for expert in range(experts):
            name = source.name.format(layer=layer, expert=expert)
            entry = by_name.pop(name, None)
            if entry is None:
                stored = released_name(name, cfg)
                problems.append(
                    Problem(
                        kind="missing_tensor",
                        tensor=stored,
                        message=f"no file of the checkpoint holds tensor {stored}; expected "
                        f"{dtypes[0]} "
                        f"{list(shapes[0])}; the configuration or the index does not belong to "
                        f"this checkpoint",
                    )
                )
                continue
            problems += _check_entry(entry, shapes, dtypes)
            entries.append(entry)
    return BoundSource(source, tuple(entries), experts)


def _check_entry(
    entry: TensorEntry, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> Iterable[Problem]:
    if entry.shape not in shapes:
        yield Problem(
            kind="shape",
            file=entry.file.name,
            tensor=entry.name,
            message=f"tensor {entry.name} in {entry.file} has the wrong shape: got "
            f"{list(entry.shape)}; expected " + " or ".join(str(list(shape)) for shape in shapes),
        )
    if entry.dtype not in dtypes:
        yield Problem(
            kind="dtype",
            file=entry.file.name,
            tensor=entry.name,
            message=f"tensor {entry.name} in {entry.file} has the wrong dtype: got {entry.dtype}; "
            f"expected "
            f"{' or '.join(dtypes)}, which convert without loss",
        )
