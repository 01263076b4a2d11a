"""Names of a checkpoint: which stored tensor fills which part of which leaf.

A checkpoint is accepted only if every described source exists exactly once, with the right shape
and a dtype that converts without loss, and nothing else is left over but the documented skips
(k3-model.md sections 3 and 7). Headers are enough to decide that, so it is decided before a weight
is read, and all problems are reported at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from k3jax.config import Dtype, ModelConfig
from k3jax.draft.config import DraftConfig
from k3jax.param_spec import ParamSpec, Source
from k3jax.params import AnyConfig, a_log_stored, describe
from k3jax.weights.errors import Problem, raise_if_any
from k3jax.weights.safetensors_file import TensorEntry, duplicate

_WRONG_CONFIG = "config.json or the index does not belong to this checkpoint"
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
        """The tensor of one layer of the stack, and of one expert (0 if there are none)."""
        return self.entries[layer_idx * self.num_experts + expert]


# module name -> parameter name -> its sources
Bound = Mapping[str, Mapping[str, tuple[BoundSource, ...]]]


def bind(tensors: Mapping[str, TensorEntry], cfg: AnyConfig, dtype: Dtype) -> Bound:
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
    unknown: list[TensorEntry] = []
    for stored, entry in tensors.items():
        name = canonical_name(stored, cfg)
        if is_skipped(stored, cfg):
            continue
        if name is None:
            unknown.append(entry)
        elif name in by_name:
            problems.append(duplicate(by_name[name], entry))
        else:
            by_name[name] = entry
    bound = {
        module: {
            name: tuple(
                _bind_source(by_name, cfg, dtype, spec, source, problems) for source in spec.sources
            )
            for name, spec in params.items()
        }
        for module, params in describe(cfg).items()
    }
    # What was bound has been taken out of `by_name`.
    for entry in (*unknown, *by_name.values()):
        message = (
            f"tensor {entry.name} in {entry.file} is not a part of this model; {_WRONG_CONFIG}"
        )
        problems.append(Problem("unknown_tensor", message, entry.file, entry.name))
    raise_if_any(problems)
    return bound


def canonical_name(stored: str, cfg: AnyConfig) -> str | None:
    """A stored name as sources spell it, or None if it has not the family's prefix.

    Some exports drop the inner `model.` (k3-model.md section 3.4).
    """
    if isinstance(cfg, DraftConfig):
        return stored
    prefix = "language_model." if cfg.family == "kimi_k3" else ""
    if not stored.startswith(prefix):
        return None
    return stored.removeprefix(prefix).removeprefix("model.")


def is_skipped(stored: str, cfg: AnyConfig) -> bool:
    """True for what a text-only model leaves out: K3's vision tower and projector, MTP layers.

    Of a draft without a vocabulary of its own it is the copy of the target's embedding.
    """
    if isinstance(cfg, DraftConfig):
        return stored == "embed_tokens.weight" and not cfg.has_own_vocab
    if cfg.family == "kimi_k3" and stored.startswith(("vision_tower.", "mm_projector.")):
        return True
    name = canonical_name(stored, cfg) or ""
    layer = _LAYER.match(name)
    return name.startswith("mtp") or (layer is not None and int(layer[1]) >= cfg.num_layers)


def released_name(name: str, cfg: AnyConfig) -> str:
    """The name under which a source is released: `canonical_name` undoes it."""
    if isinstance(cfg, DraftConfig):
        return name
    inner = name if name == "lm_head.weight" else f"model.{name}"
    return f"language_model.{inner}" if cfg.family == "kimi_k3" else inner


def stored_shapes(spec: ParamSpec, source: Source, cfg: AnyConfig) -> tuple[tuple[int, ...], ...]:
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
            assert isinstance(cfg, ModelConfig)  # drafts have no gates
            plain = [shape, (1, 1, shape[0], 1)]
            stored = (a_log_stored(cfg),)
            if cfg.family == "kimi_linear":
                plain.reverse()
            return tuple(dict.fromkeys([stored, *plain] if stored != shape else plain))


def num_leading_dims(spec: ParamSpec) -> int:
    """Dims of a leaf in front of a stored tensor's: the stack, and the place inside a layer."""
    return bool(spec.layers) + len(spec.sources[0].index)


def num_experts(source: Source, cfg: AnyConfig) -> int:
    """Tensors of a source in each layer: one for each expert, or one."""
    if None not in source.index:
        return 1
    assert isinstance(cfg, ModelConfig)  # drafts are dense
    return cfg.num_experts


def _bind_source(
    by_name: dict[str, TensorEntry],
    cfg: AnyConfig,
    dtype: Dtype,
    spec: ParamSpec,
    source: Source,
    problems: list[Problem],
) -> BoundSource:
    """Take a source's tensors out of `by_name`, and check each."""
    experts = num_experts(source, cfg)
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
                expected = f"expected {dtypes[0]} {list(shapes[0])}"
                message = f"no file holds tensor {stored}: {expected}; {_WRONG_CONFIG}"
                problems.append(Problem("missing_tensor", message, tensor=stored))
            else:
                problems += _check_entry(entry, shapes, dtypes)
                entries.append(entry)
    return BoundSource(source, tuple(entries), experts)


def _check_entry(
    entry: TensorEntry, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> Iterator[Problem]:
    where = f"tensor {entry.name} in {entry.file}"
    if entry.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        message = f"{where} has the wrong shape: got {list(entry.shape)}; expected {expected}"
        yield Problem("shape", message, entry.file, entry.name)
    if entry.dtype not in dtypes:
        expected = f"expected {' or '.join(dtypes)}, which loses nothing"
        message = f"{where} has the wrong dtype: got {entry.dtype}; {expected}"
        yield Problem("dtype", message, entry.file, entry.name)
