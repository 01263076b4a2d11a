"""What the server tells about the served model. Known before the weights are loaded."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError, ModelConfig
from serving.rpc.protocol import messages
from serving.tokenizer import Tokenizer

GENERATION_FILE = "generation_config.json"
# Defaults that requests of this server can honour; a gateway fills them into what it sends.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model, as clients see it.

    Attributes:
      name: what clients call it.
      folder: absolute path of the checkpoint.
      eos_token_ids: every id that ends an answer, whichever file names it (KF-V19).
      max_context_tokens: prompt plus output of one request.
      sampling_defaults: of `generation_config.json`, as far as requests can have them.
    """

    name: str
    folder: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    has_tokenizer: bool
    sampling_defaults: Mapping[str, float]

    @property
    def default_temperature(self) -> float:
        """For a request that has none."""
        return self.sampling_defaults.get("temperature", 1.0)

    def message(self) -> messages.GetModelInfoResponse:
        """The reply of `GetModelInfo`."""
        return messages.GetModelInfoResponse(
            model_path=self.folder,
            # Never empty when the model path is: a gateway without either loads no tokenizer.
            tokenizer_path=self.folder if self.has_tokenizer else "",
            is_generation=True,
            supports_vision=False,
            served_model_name=self.name,
            model_type=self.model_type,
            architectures=self.architectures,
            vocab_size=self.vocab_size,
            max_context_length=self.max_context_tokens,
            max_req_input_len=self.max_context_tokens - 1,
            eos_token_ids=self.eos_token_ids,
            bos_token_id=self.bos_token_id or 0,
            pad_token_id=self.pad_token_id or 0,
            default_sampling_params_json=json.dumps(dict(self.sampling_defaults)),
        )


def read_model_info(
    folder: Path,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    name: str | None,
    max_context_tokens: int,
) -> ModelInfo:
    """Describe the model of a folder.

    Args:
      model: the parsed `config.json` of the folder.
      name: what clients call the model; None takes the folder's name.

    Raises:
      ConfigError: a file of the folder cannot be used.
    """
    config = read_json_object(folder / "config.json")
    generation: Mapping[str, Any] = {}
    if (folder / GENERATION_FILE).is_file():
        generation = read_json_object(folder / GENERATION_FILE)
    named = {*_token_ids(generation), *model.eos_token_ids}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        named.add(tokenizer.eos_token_id)
    eos_token_ids = tuple(sorted(named))
    wrong = [id for id in eos_token_ids if not 0 <= id < model.vocab_size]
    if wrong:
        raise ConfigError(
            f"eos_token_id of {folder} is not in the vocabulary: got {wrong}; "
            f"expected 0..{model.vocab_size - 1}"
        )
    return ModelInfo(
        name=name or folder.resolve().name,
        folder=str(folder.resolve()),
        model_type=str(config.get("model_type", "")),
        architectures=tuple(map(str, config.get("architectures") or ())),
        vocab_size=model.vocab_size,
        bos_token_id=model.bos_token_id,
        pad_token_id=model.pad_token_id,
        eos_token_ids=eos_token_ids,
        max_context_tokens=max_context_tokens,
        has_tokenizer=tokenizer is not None,
        sampling_defaults=_sampling_defaults(generation),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
      ConfigError: it is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing: expected it in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not understood: expected a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _token_ids(generation: Mapping[str, Any]) -> list[int]:
    match generation.get("eos_token_id"):
        case None:
            return []
        case int(id):
            return [id]
        case [*ids] if all(isinstance(id, int) for id in ids):
            return ids
        case other:
            raise ConfigError(
                f"eos_token_id of {GENERATION_FILE} is not understood: got {other!r}; "
                "expected an id or a list of ids"
            )


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """The defaults that a gateway may put into requests."""
    defaults = {field: generation.get(field) for field in _SAMPLING_DEFAULTS}
    for field, value in defaults.items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ConfigError(
                f"{field} of {GENERATION_FILE} is not understood: got {value!r}; expected a number"
            )
    return {field: value for field, value in defaults.items() if value is not None}
