"""Logits of one token sequence through the paged pool: the programs of serving, without
sampling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int32

from k3jax import inputs
from k3jax.buckets import Bucket, Kind
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
    """Logits after each token of a single sequence; see `Scorer.score`."""
    _check_tokens(tokens, loaded.cfg.vocab_size)
    steps = list(_cut(len(tokens), chunk, num_decode))
    scorer = Scorer(
        loaded,
        max_tokens=len(tokens),
        max_step_tokens=max(end - start for _, start, end in steps),
        with_decode=num_decode > 0,
    )
    return scorer.score(tokens, chunk=chunk, num_decode=num_decode)


class Scorer:
    """Scores sequences one after another; compiled once. All replicas of the mesh do the same.

    Args:
      max_tokens: length of the longest sequence.
      max_step_tokens: tokens of the longest prefill step.
      with_decode: whether sequences may go token by token through the decode program.
    """

    def __init__(
        self, loaded: LoadedModel, *, max_tokens: int, max_step_tokens: int, with_decode: bool
    ):
        columns = -(-max_tokens // loaded.geometry.page_tokens)
        self._vocab_size = loaded.cfg.vocab_size
        self._replicas = loaded.parallel.dp
        self._groups = len(loaded.spec.recurrent_groups)
        self._pages = np.arange(1, 1 + columns, dtype=np.int32)
        self._states = np.arange(1 + columns, 1 + columns + self._groups, dtype=np.int32)
        self._buckets = {"prefill": Bucket("prefill", max_step_tokens, 1, columns)}
        if with_decode:
            self._buckets["decode"] = Bucket("decode", 1, 1, columns)
        self._model = PagedModel(
            loaded.program(1 + columns + self._groups),
            loaded.mesh,
            loaded.params,
            scoring_step,
            self._buckets.values(),
        )

    def score(
        self, tokens: Int32[np.ndarray, " T"], *, chunk: int | None = None, num_decode: int = 0
    ) -> Float32[np.ndarray, "T V"]:
        """Logits after each token of one sequence that starts at position 0.

        Args:
          chunk: tokens of a prefill step; None takes them all at once.
          num_decode: last tokens, which go one at a time through the decode program.

        Raises:
          ConfigError: the sequence is empty, has ids outside the vocabulary, or cannot be cut this
          way.
        """
        _check_tokens(tokens, self._vocab_size)
        pages = [*self._pages.tolist(), *self._states.tolist()]
        self._model.clear([pages] * self._replicas)
        logits = [
            self._step(kind, tokens[start:end], start)
            for kind, start, end in _cut(len(tokens), chunk, num_decode)
        ]
        return np.concatenate(logits)

    def _step(self, kind: Kind, tokens: np.ndarray, start: int) -> np.ndarray:
        bucket = self._buckets[kind]
        step = inputs.empty_inputs(bucket, self._groups, scratch_slot=self._model.program.max_rows)
        step.tokens[: len(tokens)] = tokens
        step.row_offsets[1] = len(tokens)
        step.computed[0] = start
        step.attention_pages[0] = self._pages
        step.state_source[0] = step.state_target[0] = self._states
        packed = inputs.pack(step, bucket, self._groups)
        result = self._model.run(bucket, np.stack([packed] * self._replicas))
        return np.asarray(result)[0, : len(tokens)]


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"tokens have the wrong form: got {tokens.dtype}{tokens.shape}; expected int32 [T], T "
            ">= 1"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(
            f"tokens are out of range: got {tokens.min()}..{tokens.max()}; expected "
            f"0..{vocab_size - 1}"
        )


def _cut(num_tokens: int, chunk: int | None, num_decode: int) -> Iterator[tuple[Kind, int, int]]:
    """Kind, start and end of each step."""
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk is out of range: got {chunk}; expected >= 1")
    if not 0 <= num_decode < num_tokens:
        raise ConfigError(
            f"decode is out of range: got {num_decode}; expected 0..{num_tokens - 1}, since at "
            "least one token must be prefilled"
        )
    prefill = num_tokens - num_decode
    for start in range(0, prefill, chunk or prefill):
        yield "prefill", start, min(start + (chunk or prefill), prefill)
    for start in range(prefill, num_tokens):
        yield "decode", start, start + 1
