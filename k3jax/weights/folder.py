"""The folder of a model: its configuration, and the files that its weights come from.

Everything here works on the configuration, the index and the headers. All problems are collected,
so that one start shows all of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from k3jax.config import ConfigError, Dtype, ModelConfig
from k3jax.draft.config import DraftConfig
from k3jax.weights.errors import Problem, WeightError, raise_if_any, refusal
from k3jax.weights.safetensors_file import TensorEntry, duplicate, parse_unique, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MANIFEST_FILE = "converted.json"
CONVERTED_FORMAT = 1

_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.(weight|weight_packed|weight_scale)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """How a converted checkpoint was made. Its file is written last, so it marks a whole one.

    Attributes:
      format: version of its layout.
      dtype: of the leaves described as `compute`.
    """

    format: int
    dtype: Dtype
    expert_format: Literal["dense", "mxfp4"]


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json`, and take the expert format from the tensors that are really there.

    The released `quantization_config` cannot be trusted for that: its `ignore` list omits three
    bf16 tensors (k3-model.md section 3.4).

    Raises:
      ConfigError: no `config.json`, or one that `ModelConfig.from_hf` refuses.
      WeightError: no checkpoint, a damaged index, or dense and packed experts in one checkpoint.
    """
    cfg = ModelConfig.from_hf(read_json(model_dir / "config.json"))
    if is_converted(model_dir):
        return dataclasses.replace(cfg, expert_format=read_manifest(model_dir).expert_format)
    return dataclasses.replace(cfg, expert_format=detect_expert_format(stored_names(model_dir)))


def read_draft_config(model_dir: Path) -> DraftConfig:
    """Read the `config.json` of a draft model.

    Raises:
      ConfigError: no `config.json`, or one that `DraftConfig.from_hf` refuses.
    """
    return DraftConfig.from_hf(read_json(model_dir / "config.json"))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder.

    Raises:
      ConfigError: the file does not exist or does not hold a JSON object.
    """
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file.name} cannot be read: got {error.strerror} for {file}; "
            "expected a model folder that holds it"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not an object: got {type(value).__name__}")
    return value


def is_converted(model_dir: Path) -> bool:
    """True for a folder that `converted.save` finished."""
    return (model_dir / MANIFEST_FILE).is_file()


def read_manifest(model_dir: Path) -> Manifest:
    """Read the manifest of a converted checkpoint.

    Raises:
      WeightError: it is damaged, or of another version of this code.
    """
    file = model_dir / MANIFEST_FILE
    value = read_json(file)
    if set(value) == {field.name for field in dataclasses.fields(Manifest)}:
        manifest = Manifest(**value)
        if manifest.format == CONVERTED_FORMAT:
            return manifest
    raise refusal(
        "converted",
        f"{file} is of another version: got {value}; expected format {CONVERTED_FORMAT}; "
        "convert the checkpoint again",
        file,
    )


def stored_names(model_dir: Path) -> Iterable[str]:
    """Stored tensor names, from the index alone when there is one."""
    weight_map = _read_index(model_dir)
    return read_header(model_dir / SINGLE_FILE) if weight_map is None else weight_map


def checkpoint_files(model_dir: Path) -> tuple[Path, ...]:
    """Every file that the weights come from, the index included."""
    weight_map = _read_index(model_dir)
    names = [SINGLE_FILE] if weight_map is None else [INDEX_FILE, *sorted(set(weight_map.values()))]
    return tuple(model_dir / name for name in names)


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
    packed = first.get("weight_packed") or first.get("weight_scale")
    if packed is not None and "weight" in first:
        raise refusal(
            "expert_format",
            f"experts are stored in two formats: got dense {first['weight']} and packed {packed}; "
            "expected all dense or all packed",
            tensor=packed,
        )
    return "dense" if packed is None else "mxfp4"


def open_checkpoint(model_dir: Path) -> dict[str, TensorEntry]:
    """Read every header of a checkpoint and check them against the index.

    Returns:
      All tensors by stored name.

    Raises:
      WeightError: with every file that is missing, malformed or cut, and every tensor that is
        missing, misplaced or there twice.
    """
    weight_map = _read_index(model_dir)
    if weight_map is None:
        return read_header(model_dir / SINGLE_FILE)
    problems = _unlisted_files(model_dir, weight_map)
    tensors: dict[str, TensorEntry] = {}
    settled: set[str] = set()  # files and tensors that already have a problem
    for file in sorted(set(weight_map.values())):
        try:
            entries = read_header(model_dir / file)
        except (WeightError, OSError) as error:
            is_read = isinstance(error, WeightError)
            found = error.found if is_read else [_missing_file(model_dir, file, weight_map, error)]
            problems.extend(found)
            settled.add(file)
            continue
        for name, entry in entries.items():
            first = tensors.setdefault(name, entry)
            if first is not entry:
                problems.append(duplicate(first, entry))
                settled.add(name)
            elif name not in weight_map:
                problems.append(_unlisted_tensor(entry))
    for name, file in weight_map.items():
        entry = tensors.get(name)
        is_there = entry is not None and entry.file.name == file
        if not is_there and file not in settled and name not in settled:
            problems.append(_misplaced(model_dir / file, name, entry))
    raise_if_any(problems)
    return tensors


def _read_index(model_dir: Path) -> dict[str, str] | None:
    """The weight map, or None for a checkpoint in a single file without an index."""
    file = model_dir / INDEX_FILE
    if not file.exists():
        if (model_dir / SINGLE_FILE).exists():
            return None
        message = f"no weights in {model_dir}: expected {INDEX_FILE} or {SINGLE_FILE}"
        raise refusal("no_weights", message, file)
    expected = "expected an object whose weight_map gives the file of each tensor, in this folder"
    try:
        index, repeated = parse_unique(file.read_bytes())
        weight_map = index["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        message = f"{file} is no safetensors index: got {got}; {expected}"
        raise refusal("index", message, file) from None
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise refusal("index", f"{file} has a wrong weight_map; {expected}", file)
    message = "{} lists tensor {} twice; expected every name once"
    raise_if_any(
        [Problem("duplicate_tensor", message.format(file, name), file, name) for name in repeated]
    )
    return weight_map


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value and value not in ("", ".", "..")


def _unlisted_files(model_dir: Path, weight_map: Mapping[str, str]) -> list[Problem]:
    listed = set(weight_map.values())
    return [
        Problem(
            "unlisted_file",
            f"{file} is not in {INDEX_FILE}: it belongs to another version of this checkpoint; "
            "remove it or fetch the index again",
            file,
        )
        for file in sorted(model_dir.glob("model*.safetensors"))
        if _SHARD.fullmatch(file.name) and file.name not in listed
    ]


def _missing_file(
    model_dir: Path, name: str, weight_map: Mapping[str, str], error: OSError
) -> Problem:
    file = model_dir / name
    tensors = [tensor for tensor, where in weight_map.items() if where == name]
    return Problem(
        "missing_file",
        f"{file} cannot be read: got {error.strerror}; {INDEX_FILE} expects {len(tensors)} "
        f"tensors in it, among them {tensors[0]}",
        file,
        tensors[0],
    )


def _unlisted_tensor(entry: TensorEntry) -> Problem:
    return Problem(
        "misplaced_tensor",
        f"{entry.file} holds tensor {entry.name}, which {INDEX_FILE} does not list: index and "
        "shards are of different versions",
        entry.file,
        entry.name,
    )


def _misplaced(file: Path, name: str, entry: TensorEntry | None) -> Problem:
    where = "no file holds it" if entry is None else f"{entry.file.name} holds it"
    return Problem(
        "misplaced_tensor",
        f"{file} does not hold tensor {name}, although {INDEX_FILE} says so; {where}",
        file,
        name,
    )
