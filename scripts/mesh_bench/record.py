"""Results of one group, written by the first of its processes as soon as they are known."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh_bench.groups import Sizes


class Recorder:
    """Appends JSON lines to a file.

    Args:
      path: None on all processes but the first.
    """

    def __init__(self, path: Path | None, sizes: Sizes):
        self.sizes = sizes
        self._path = path
        self._start = time.monotonic()

    @contextlib.contextmanager
    def case(self, case: str, shapes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """One case: fill the line that this yields. A case that fails does not end the others."""
        line: dict[str, Any] = {"case": case, "shapes": dict(shapes)}
        try:
            yield line
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            line["failure"] = f"{type(error).__name__}: {first[:300]}"
        self.write(line)

    def write(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def note(self, text: str) -> None:
        """Log a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)
