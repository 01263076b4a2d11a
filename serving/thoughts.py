"""Thoughts: the text that Kimi K3 writes before its answer (k3-model.md section 8).

The prompt of a chat that thinks ends inside the channel `think`. The text of a thought is free, and
contains no control token; so the first one ends it, and from there to the first token of the answer
the format leaves no choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from k3jax.controls import mask_of
from serving.tokenizer import Tokenizer

_OPENING = ("<|open|>", "think", "<|sep|>")
_CLOSING = ("<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThoughtFormat:
    """How thoughts are written.

    Attributes:
      opening: tokens that open one.
      closing: tokens from its end to the first token of the answer.
      text: mask of what may come in one, its end included.
      control_ids: tokens that its text never contains.
      vocab_size: of the model.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    text: Int32[np.ndarray, " W"]
    control_ids: frozenset[int]
    vocab_size: int

    @classmethod
    def read(cls, tokenizer: Tokenizer, vocab_size: int) -> ThoughtFormat | None:
        """That of a tokenizer; None if it lacks the control tokens."""
        control = tokenizer.control_tokens
        if not control.keys() >= {name for name in (*_OPENING, *_CLOSING) if "|" in name}:
            return None
        control_ids = frozenset(control.values())
        closing = _encode(tokenizer, _CLOSING)
        may_come = (
            token
            for token, text in enumerate(tokenizer.vocab)
            if token == closing[0] or (text and token not in control_ids)
        )
        return cls(
            opening=_encode(tokenizer, _OPENING),
            closing=closing,
            text=mask_of(may_come, vocab_size),
            control_ids=control_ids,
            vocab_size=vocab_size,
        )

    def thought_after(self, prompt: Sequence[int], end_ids: Sequence[int]) -> Thought | None:
        """The thought inside which a prompt ends, if it does.

        Args:
          end_ids: tokens that end the request. In a thought they do not come: there would be no
            answer.
        """
        last = (i for i in reversed(range(len(prompt))) if prompt[i] in self.control_ids)
        end = next(last, -1) + 1
        if tuple(prompt[max(0, end - len(self.opening)) : end]) != self.opening:
            return None
        text = self.text & ~mask_of(end_ids, self.vocab_size)
        return Thought(text, self.closing, self.vocab_size)


class Thought:
    """Follows the thought of one request up to its answer. Used by one thread at a time.

    Args:
      text: mask of what may come in the thought, its end included.
      closing: tokens from its end to the answer.
      vocab_size: of the model.
    """

    def __init__(
        self, text: Int32[np.ndarray, " W"], closing: Sequence[int], vocab_size: int
    ) -> None:
        self._text, self._closing, self._vocab_size = text, closing, vocab_size
        self._num_closing = 0  # tokens of `closing` that have come

    @property
    def has_ended(self) -> bool:
        """Whether the answer comes next."""
        return self._num_closing == len(self._closing)

    def mask(self) -> Int32[np.ndarray, " W"]:
        """What may come next, before the answer: a bit for each token; see `k3jax.controls`."""
        if not self._num_closing:
            return self._text
        return mask_of(self._closing[self._num_closing : self._num_closing + 1], self._vocab_size)

    def accept(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Go on by the tokens that came; those that belong to the answer are returned."""
        for count, token in enumerate(token_ids):
            if self.has_ended:
                return token_ids[count:]
            self._num_closing += token == self._closing[self._num_closing]
        return ()


def _encode(tokenizer: Tokenizer, parts: Sequence[str]) -> tuple[int, ...]:
    """Ids of control tokens, given by their names, and of text between them."""
    control = tokenizer.control_tokens
    return tuple(
        token
        for part in parts
        for token in ([control[part]] if part in control else tokenizer.encode(part))
    )
