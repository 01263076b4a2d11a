"""Grammars: which tokens may come next in an answer that has to follow one, by llguidance.

The library is an optional one (`grammar` among the extras). A grammar is compiled once and kept;
every request has a matcher of its own, which the engine asks for a mask before each of its steps
and tells each token.
"""

from __future__ import annotations

import collections
import importlib
import json
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from k3jax.controls import mask_of
from serving.request import Grammar, RequestError
from serving.tags import to_lark
from serving.thoughts import Thought, ThoughtFormat
from serving.tokenizer import Tokenizer

MAX_CHARS = 1 << 20  # of a grammar
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}  # else a model may never stop it
MAX_KEPT = 64  # compiled grammars


def _load() -> Any:
    try:
        for part in ("gbnf_to_lark", "numpy"):
            importlib.import_module(f"llguidance.{part}")
        return importlib.import_module("llguidance")
    except ImportError:
        return None


_library = _load()


class GrammarMatcher:
    """Follows the answer of one request. Used by one thread at a time.

    Args:
      kind: of the grammar, for errors.
      matcher: of the library, at the start.
      end_ids: tokens that end the request; they may come where the grammar may end.
      vocab_size: of the model.
      thought: comes before the answer, if any.
    """

    def __init__(
        self,
        kind: str,
        matcher: Any,
        end_ids: Sequence[int],
        vocab_size: int,
        thought: Thought | None = None,
    ):
        self._kind, self._matcher, self._end_ids = kind, matcher, end_ids
        self._ends = mask_of(end_ids, vocab_size)
        self._thought = thought

    def mask(self) -> Int32[np.ndarray, " W"]:
        """What may come next: a bit for each token; see `k3jax.controls`.

        Raises:
          RequestError: INVALID_ARGUMENT, the grammar is too complex to be followed any further. It
            would be wrong to end the answer here as if it were complete.
        """
        if self._thought is not None and not self._thought.has_ended:
            return self._thought.mask()
        words = np.zeros((1, len(self._ends)), np.int32)
        if not self._matcher.is_stopped():
            _library.numpy.fill_next_token_bitmask(self._matcher, words)
        words, problem = words[0] & ~self._ends, self._matcher.get_error()
        if not problem and self._matcher.is_accepting():
            words |= self._ends
        if problem or not words.any():
            raise RequestError(
                "INVALID_ARGUMENT",
                f"{self._kind} cannot be followed: {_shown(problem or 'nothing may come next')}",
            )
        return words

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by the tokens that came."""
        if self._thought is not None:
            token_ids = self._thought.accept(token_ids)
        tokens = [token for token in token_ids if token not in self._end_ids]
        if tokens and not self._matcher.is_stopped():
            self._matcher.consume_tokens(tokens)


class Grammars:
    """Compiles grammars, and keeps the last ones. May be used by several threads.

    Args:
      tokenizer: of the model, whose tokens the answers consist of.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[Grammar, Any] = collections.OrderedDict()
        self._of_library: Any = None
        self._thoughts = ThoughtFormat.read(tokenizer, vocab_size)

    def matcher(
        self, grammar: Grammar, end_ids: Sequence[int], prompt: Sequence[int] = ()
    ) -> GrammarMatcher:
        """A matcher at the end of a prompt. Compiling can take a second.

        Structural tags say themselves where in thought and answer something has to follow a format.

        Args:
          end_ids: those of the model.
          prompt: token ids. If it ends inside a thought, the grammar begins behind that; without
            one it begins at once.

        Raises:
          RequestError: UNIMPLEMENTED, the library is not installed; INVALID_ARGUMENT, it does not
            take the grammar.
        """
        if _library is None:
            raise RequestError(
                "UNIMPLEMENTED",
                f"{grammar.kind} is not supported: the server has no llguidance; install the extra "
                "`grammar`",
            )
        if not end_ids:
            raise RequestError(
                "UNIMPLEMENTED",
                f"{grammar.kind} is not supported: the model has no end token; leave it out",
            )
        if len(grammar.text) > MAX_CHARS:
            raise RequestError(
                "INVALID_ARGUMENT",
                f"{grammar.kind} is too long: got {len(grammar.text)} characters; expected at most "
                f"{MAX_CHARS}",
            )
        with self._lock:
            compiled = self._kept.get(grammar)
            if compiled is None:
                compiled = self._kept[grammar] = self._compile(grammar, end_ids)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            copied = compiled.deep_copy()
        thought = None
        if self._thoughts is not None and grammar.kind != "structural_tag":
            thought = self._thoughts.thought_after(prompt, end_ids)
        return GrammarMatcher(grammar.kind, copied, end_ids, self._vocab_size, thought)

    def _compile(self, grammar: Grammar, end_ids: Sequence[int]) -> Any:
        if self._of_library is None:
            wrapped = _library.TokenizerWrapper(
                _Vocabulary(self._tokenizer, self._vocab_size, end_ids[0])
            )
            self._of_library = _library.LLTokenizer(wrapped, n_vocab=self._vocab_size)
        try:
            matcher = _library.LLMatcher(
                self._of_library,
                _source(grammar, self._tokenizer.control_tokens),
                log_level=0,
                limits=_library.LLParserLimits(verbose_errors=False),
            )
            problem = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # the library's converters raise any
            matcher, problem = None, str(error)
        if problem:
            raise RequestError(
                "INVALID_ARGUMENT",
                f"{grammar.kind} is not understood: {_shown(problem)}",
            )
        return matcher


class _Vocabulary:
    """Our tokenizer as the library wants one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        vocab = [*tokenizer.vocab, *[b""] * (vocab_size - len(tokenizer.vocab))][:vocab_size]
        control = {*tokenizer.control_tokens.values(), eos_token_id}
        # Ids of which the vocabulary knows nothing can never be part of an answer's text.
        control |= {token for token, text in enumerate(vocab) if not text}
        names = {token: name for name, token in tokenizer.control_tokens.items()}
        self.tokens = [
            names.get(token, f"<|{token}|>").encode() if token in control else text
            for token, text in enumerate(vocab)
        ]
        self.special_token_ids = sorted(token for token in control if token < vocab_size)
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode())


def _source(grammar: Grammar, control_names: Collection[str]) -> str:
    """The grammar as the library takes it.

    Raises:
      ValueError: it is not understood.
    """
    matcher, text = _library.LLMatcher, grammar.text
    match grammar.kind:
        case "json_schema":
            return matcher.grammar_from_json_schema(text, defaults=_JSON)
        case "json_object":
            return matcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON)
        case "regex":
            return matcher.grammar_from_regex(text)
        case "choice":
            # One terminal: as alternatives of a rule, many choices exceed the parser's limit.
            choices = " | ".join(map(json.dumps, json.loads(text)))
            return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "grammar":
            return matcher.grammar_from_lark(_library.gbnf_to_lark.any_to_lark(text))
        case "structural_tag":
            return matcher.grammar_from_lark(to_lark(json.loads(text), control_names))


def _shown(problem: str) -> str:
    """The library's reason in one line."""
    return " ".join(problem.removesuffix("<non-verbose/>").split())[:500]
