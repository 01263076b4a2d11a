"""The other engine, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from host_bench.calls import Script
from host_bench.replay import Timing


class BaselineError(Exception):
    """The baseline's interpreter has no working vLLM, or its process ended."""


class Baseline:
    """vLLM's cache manager behind a pipe; it computes only while it is asked.

    Args:
      python: interpreter that has vLLM.
      clock: key of `CLOCKS`.

    Attributes:
      versions: of vLLM and of its interpreter.
    """

    def __init__(self, python: str, clock: str):
        command = [python, "-P", str(Path(__file__).with_name("vllm_cache.py")), clock]
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
        except OSError as error:
            raise BaselineError(f"{python} does not start: {error}") from error
        self._loaded: Script | None = None
        self.versions: Mapping[str, str] = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # ends it: its input is closed
        self._folder.cleanup()

    def replay(self, script: Script) -> Timing:
        """Carry out a script once."""
        if self._loaded is not script:
            path = Path(self._folder.name, "script.json")
            path.write_text(json.dumps(script.to_json()))
            self._ask(do="load", path=str(path))
            self._loaded = script
        return Timing(**self._ask(do="run"))

    def hash_ns(self, num_tokens: int, unit_tokens: int) -> int:
        """Nanoseconds of the prefix keys of one prompt."""
        return self._ask(do="hash", tokens=num_tokens, unit_tokens=unit_tokens)["ns"]

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = [text for text in self._log.read_text().splitlines() if text.strip()][-1:]
            raise BaselineError(f"the baseline ended: {''.join(last) or 'no message'}")
        return json.loads(line)
