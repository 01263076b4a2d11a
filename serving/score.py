"""Logits of one token sequence through the paged pool: the programs of serving, without sampling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int32

from k3jax import inputs
from k3jax.buckets import Bucket
from k3jax.config import ConfigError
from k3jax.paged_model import PagedModel
from k3jax.step import scoring_step
from serving.build import LoadedModel


def score(
    loaded: LoadedModel,
    tokens: Int32[np.ndarray, " T"],
    *,
    chunk: int | None = None,
    num_decode: int = 0,
) -> Float32[np.ndarray, "T V"]:
    """Logits after each token of one sequence.

    Args:
      tokens: token ids; the sequence starts at position 0.
      chunk: tokens of a prefill step; None takes them all at once.
      num_decode: last tokens, which go one at a time through the decode program.

    Raises:
      ConfigError: the sequence is empty, has ids outside the vocabulary, or cannot be cut this way.
    """
    steps = list(_cut(_checked(tokens, loaded.cfg.vocab_size), chunk, num_decode))
    num_columns = -(-len(tokens) // loaded.geometry.page_tokens)
    num_groups = len(loaded.spec.recurrent_groups)
    pages = np.arange(1, 1 + num_columns, dtype=np.int32)
    states = np.arange(1 + num_columns, 1 + num_columns + num_groups, dtype=np.int32)
    buckets = {
        Bucket(kind, end - start, 1, num_columns) for kind, start, end in steps
    }
    model = PagedModel(
        loaded.program(1 + num_columns + num_groups),
        loaded.mesh,
        loaded.params,
        scoring_step,
        sorted(buckets),
    )
    logits = []
    for kind, start, end in steps:
        bucket = Bucket(kind, end - start, 1, num_columns)
        step = inputs.empty_inputs(bucket, num_groups, scratch_slot=model.program.max_rows)
        step.tokens[:] = tokens[start:end]
        step.row_offsets[1] = end - start
        step.computed[0] = start
        step.attention_pages[0] = pages
        step.state_source[0] = step.state_target[0] = states
        result = model.run(bucket, inputs.pack(step, bucket, num_groups))
        logits.append(np.asarray(result))
    return np.concatenate(logits)


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"tokens have the wrong form: got {tokens.dtype}{tokens.shape}; expected int32 [T], T >= 1"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(
            f"tokens are out of range: got {tokens.min()}..{tokens.max()}; expected 0..{vocab_size - 1}"
        )
    return tokens


def _cut(
    tokens: np.ndarray, chunk: int | None, num_decode: int
) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each step."""
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk is out of range: got {chunk}; expected >= 1")
    if not 0 <= num_decode < len(tokens):
        raise ConfigError(
            f"decode is out of range: got {num_decode}; expected 0..{len(tokens) - 1}, since at least "
            f"one token must be prefilled"
        )
    prefill = len(tokens) - num_decode
    for start in range(0, prefill, chunk or prefill):
        yield "prefill", start, min(start + (chunk or prefill), prefill)
    for start in range(prefill, len(tokens)):
        yield "decode", start, start + 1
