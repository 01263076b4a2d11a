"""Names of a checkpoint: which stored tensor fills which part of which leaf (k3-model.md section 3).

Everything here works on headers. A checkpoint is accepted only if every described source exists exactly once, with
the right shape and a dtype that converts without loss, and nothing else is left over but the documented skips.
All problems are collected, so that one start shows all of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from k3jax.config import ConfigError, Dtype, ModelConfig
from k3jax.params import ParamSpec, Source, a_log_stored, describe
from k3jax.weights.errors import Problem, WeightError, raise_if_any
from k3jax.weights.safetensors_file import TensorEntry, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.(weight|weight_packed|weight_scale)$")

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
        """The tensor of the `layer_idx`-th layer of the stack, and of one expert (0 if there are none)."""
        return self.entries[layer_idx * self.num_experts + expert]


# module name -> parameter name -> its sources
Bound = Mapping[str, Mapping[str, tuple[BoundSource, ...]]]


def read_config(model_dir: Path) -> ModelConfig:
    """Read `config.json`, and take the expert format from the tensors that are really there.

    The released `quantization_config` cannot be trusted for that: its `ignore` list omits bf16 tensors
    (k3-model.md section 3.4).

    Raises:
      ConfigError: no `config.json`, or one that `ModelConfig.from_hf` refuses.
      WeightError: no checkpoint, a damaged index, or dense and packed experts in one checkpoint.
    """
    cfg = ModelConfig.from_hf(read_json(model_dir / "config.json"))
    return dataclasses.replace(cfg, expert_format=detect_expert_format(stored_names(model_dir)))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder.

    Raises:
      ConfigError: the file does not exist or does not hold a JSON object.
    """
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file.name} cannot be read: got {error.strerror} for {file}; expected a model folder that holds it"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file} is not a JSON object: got {type(value).__name__}; expected an object"
        )
    return value


def stored_names(model_dir: Path) -> Iterable[str]:
    """Stored tensor names, from the index alone when there is one."""
    weight_map = _read_index(model_dir)
    return read_header(model_dir / SINGLE_FILE) if weight_map is None else weight_map


def checkpoint_files(model_dir: Path) -> tuple[Path, ...]:
    """Every file that the weights come from, the index included."""
    weight_map = _read_index(model_dir)
    if weight_map is None:
        return (model_dir / SINGLE_FILE,)
    return (model_dir / INDEX_FILE, *(model_dir / name for name in sorted(set(weight_map.values()))))


def detect_expert_format(names: Iterable[str]) -> Literal["dense", "mxfp4"]:
    """Decide by the presence of `weight_packed`.

    Raises:
      WeightError: some experts are packed and some are dense.
    """
    first: dict[str, str] = {}
    for name in names:
        match = _EXPERT.search(name)
        if match is not None:
            first.setdefault(match[1], name)
    if "weight" in first and len(first) > 1:
        packed = first.get("weight_packed") or first["weight_scale"]
        raise WeightError(
            Problem(
                kind="expert_format",
                tensor=packed,
                message=f"experts are stored in two formats: got dense {first['weight']} and packed {packed}; "
                "expected all dense or all packed",
            )
        )
    return "mxfp4" if "weight_packed" in first else "dense"


def open_checkpoint(model_dir: Path) -> dict[str, TensorEntry]:
    """Read every header of a checkpoint and check them against the index.

    Returns:
      All tensors by stored name.

    Raises:
      WeightError: with every file and tensor that is missing, misplaced, twice there, cut or malformed.
    """
    weight_map = _read_index(model_dir)
    if weight_map is None:
        return read_header(model_dir / SINGLE_FILE)
    problems = _unlisted_files(model_dir, weight_map)
    tensors: dict[str, TensorEntry] = {}
    unreadable: set[str] = set()
    for file in sorted(set(weight_map.values())):
        try:
            entries = read_header(model_dir / file)
        except WeightError as error:
            problems.extend(error.found)
            unreadable.add(file)
            continue
        except OSError as error:
            problems.append(_missing_file(model_dir, file, weight_map, error))
            unreadable.add(file)
            continue
        for name, entry in entries.items():
            if name in tensors:
                problems.append(_duplicate(name, tensors[name], entry))
            tensors[name] = entry
    for name, file in weight_map.items():
        if file not in unreadable and (name not in tensors or tensors[name].file.name != file):
            problems.append(_misplaced(model_dir, name, file, tensors.get(name)))
    raise_if_any(problems)
    return tensors


def bind(tensors: Mapping[str, TensorEntry], cfg: ModelConfig, dtype: Dtype) -> Bound:
    """Find the stored tensors of every source.

    Args:
      tensors: from `open_checkpoint`.
      cfg: with the checkpoint's expert format.
      dtype: that leaves of dtype `compute` will have.

    Raises:
      WeightError: with every tensor that is missing, unknown, there twice, of a wrong shape, or of a dtype that
        would lose precision.
    """
    problems: list[Problem] = []
    by_name: dict[str, TensorEntry] = {}
    for stored, entry in tensors.items():
        name = canonical_name(stored, cfg)
        if name in by_name:
            problems.append(_duplicate(stored, by_name[name], entry))
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

    Some exports say `language_model.layers.` for `language_model.model.layers.` (k3-model.md section 3.4). A name
    without the prefix is returned whole: no source has such a name, so it is reported as unknown.
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
    """Dims of a leaf in front of those of one stored tensor: the stack, and the positions inside a layer."""
    return bool(spec.layers) + len(spec.sources[0].index)


def _read_index(model_dir: Path) -> dict[str, str] | None:
    """The weight map, or None for a checkpoint in a single file without an index."""
    file = model_dir / INDEX_FILE
    if not file.exists():
        if (model_dir / SINGLE_FILE).exists():
            return None
        raise WeightError(
            Problem(
                kind="no_weights",
                file=INDEX_FILE,
                message=f"no weights in {model_dir}: expected {INDEX_FILE} or {SINGLE_FILE}",
            )
        )
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            seen: set[str] = set()
            repeated.extend(key for key, _ in pairs if key in seen or seen.add(key))
        return mapping

    try:
        weight_map = json.loads(file.read_bytes(), object_pairs_hook=unique)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(
            Problem(
                kind="index",
                file=INDEX_FILE,
                message=f"{file} is not a safetensors index: {type(error).__name__} {error}; expected an object "
                "with weight_map",
            )
        ) from None
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise WeightError(
            Problem(
                kind="index",
                file=INDEX_FILE,
                message=f"{file} has a wrong weight_map; expected tensor name -> file name in the same folder",
            )
        )
    if repeated:
        raise WeightError(
            [
                Problem(
                    kind="duplicate_tensor",
                    file=INDEX_FILE,
                    tensor=name,
                    message=f"{file} lists tensor {name} twice; expected every name once",
                )
                for name in repeated
            ]
        )
    return weight_map


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value and value not in ("", ".", "..")


def _unlisted_files(model_dir: Path, weight_map: Mapping[str, str]) -> list[Problem]:
    listed = set(weight_map.values())
    return [
        Problem(
            kind="unlisted_file",
            file=path.name,
            message=f"{path} is not in {INDEX_FILE}: it belongs to another version of this checkpoint; remove it "
            "or fetch the index again",
        )
        for path in sorted(model_dir.glob("model*.safetensors"))
        if _SHARD.fullmatch(path.name) and path.name not in listed
    ]


def _missing_file(
    model_dir: Path, file: str, weight_map: Mapping[str, str], error: OSError
) -> Problem:
    names = [name for name, where in weight_map.items() if where == file]
    return Problem(
        kind="missing_file",
        file=file,
        tensor=names[0],
        message=f"{model_dir / file} cannot be read: got {error.strerror}; {INDEX_FILE} expects {len(names)} tensors "
        f"in it, among them {names[0]}",
    )


def _duplicate(name: str, first: TensorEntry, second: TensorEntry) -> Problem:
    return Problem(
        kind="duplicate_tensor",
        file=second.file.name,
        tensor=name,
        message=f"tensor {name} is there twice: got {first.name} in {first.file} and {second.name} in "
        f"{second.file}; expected it once",
    )


def _misplaced(model_dir: Path, name: str, file: str, entry: TensorEntry | None) -> Problem:
    where = "no file holds it" if entry is None else f"{entry.file.name} holds it"
    return Problem(
        kind="misplaced_tensor",
        file=file,
        tensor=name,
        message=f"{model_dir / file} does not hold tensor {name}, although {INDEX_FILE} says so; {where}",
    )


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
                        message=f"no file of the checkpoint holds tensor {stored}; expected {dtypes[0]} "
                        f"{list(shapes[0])}; the configuration or the index does not belong to this checkpoint",
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
            message=f"tensor {entry.name} in {entry.file} has the wrong shape: got {list(entry.shape)}; expected "
            + " or ".join(str(list(shape)) for shape in shapes),
        )
    if entry.dtype not in dtypes:
        yield Problem(
            kind="dtype",
            file=entry.file.name,
            tensor=entry.name,
            message=f"tensor {entry.name} in {entry.file} has the wrong dtype: got {entry.dtype}; expected "
            f"{' or '.join(dtypes)}, which convert without loss",
        )
