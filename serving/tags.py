"""Structural tags: free text with parts that follow a format, as gateways write tool calls.

The JSON is that of xgrammar: `{"type": "structural_tag", "format": ...}`. Formats that are read:
`const_string`, `regex`, `json_schema`, `any_text`, `sequence`, `or`, `plus`, `star`, `optional`,
`tag`, `triggered_tags`. The result is a grammar in the dialect of Lark that llguidance reads, in
which names of control tokens stand for the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

_TEXT = r"/(.|\n)*/"
_REPEATS = {"plus": "+", "star": "*", "optional": "?"}


def to_lark(asked: Any, control_names: Collection[str]) -> str:
    """The grammar of a structural tag.

    Args:
      asked: the parsed JSON.
      control_names: of the tokenizer's control tokens, which free text never contains.

    Raises:
      ValueError, KeyError: there is no format, or one that is not read.
    """
    if "format" not in asked:
        raise ValueError('expected {"type": "structural_tag", "format": {...}}')
    names = "|".join(map(re.escape, sorted(control_names, key=len, reverse=True)))
    return f"start: {_Writer(names).rule(asked['format'])}"


class _Writer:
    """Writes formats as expressions of one rule.

    Args:
      names: a pattern of all control tokens.
    """

    def __init__(self, names: str):
        self._control = re.compile(f"({names})") if names else re.compile(r"(?!)()")

    def rule(self, form: Mapping[str, Any]) -> str:
        """The expression of a format.

        Raises:
          ValueError, KeyError: it is not read, or lacks something.
        """
        kind: str = form["type"]
        match kind:
            case "const_string":
                return self._literal(form["value"])
            case "regex":
                pattern = form["pattern"].replace("/", r"\/")
                return f"/{pattern}/"
            case "json_schema":
                return f"%json {json.dumps(form['json_schema'])}"
            case "any_text":
                return _TEXT
            case "sequence":
                return f"({' '.join(map(self.rule, form['elements']))})"
            case "or":
                return f"({' | '.join(map(self.rule, form['elements']))})"
            case "plus" | "star" | "optional":
                return f"({self.rule(form['content'])}){_REPEATS[kind]}"
            case "tag":
                return self._tag(form)
            case "triggered_tags":
                return self._triggered(form)
            case _:
                raise ValueError(f"format is not supported: got {kind!r}")

    def _literal(self, text: str) -> str:
        parts = [part for part in self._control.split(text) if part]
        shown = (part if self._control.fullmatch(part) else json.dumps(part) for part in parts)
        return f"({' '.join(shown)})" if parts else '""'

    def _tag(self, form: Mapping[str, Any]) -> str:
        begin, end = self._literal(form["begin"]), self._literal(form["end"])
        return f"({begin} {self.rule(form['content'])} {end})"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        """Text in which a trigger begins a tag: a control token, which text never contains."""
        for trigger in form["triggers"]:
            if not self._control.match(trigger):
                raise ValueError(f"triggers have to begin with a control token: got {trigger!r}")
        tags = f"({' | '.join(map(self._tag, form['tags']))})"
        if form.get("stop_after_first"):
            return f"({_TEXT} {tags})" if form.get("at_least_one") else f"{_TEXT} {tags}?"
        return f"({_TEXT} {tags}){'+' if form.get('at_least_one') else '*'} {_TEXT}"
