"""Text to train on: the sources of Python's standard library, as bytes.

They are under the PSF License; its text lies beside the model. Files are listed in the
order of their paths; a file is held out if the SHA-256 of its path says so, so that the split does
not depend on anything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HELD_OUT_SHARE = 0.02
_SKIPPED = frozenset({"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token streams, files one after the other.

    Attributes:
      files: path below the library's folder and SHA-256 of each file, held-out ones marked.
    """

    train: np.ndarray
    held_out: np.ndarray
    files: tuple[dict[str, object], ...]


def read_corpus(begin: int, end: int, root: Path | None = None) -> Corpus:
    """Read the library of the Python that runs.

    Args:
      begin, end: token ids in front of and behind every file.
      root: folder to read instead.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    streams: dict[bool, list[np.ndarray]] = {False: [], True: []}
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(name.encode()).digest()
        is_held_out = int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32
        body = np.frombuffer(content, np.uint8).astype(np.int32)
        streams[is_held_out].append(np.concatenate([[begin], body, [end]]).astype(np.int32))
        files.append(
            {
                "path": name,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "held_out": is_held_out,
            }
        )
    if not streams[False] or not streams[True]:
        raise ValueError(f"too few Python files: got {len(files)} in {root}; expected hundreds")
    return Corpus(
        train=np.concatenate(streams[False]),
        held_out=np.concatenate(streams[True]),
        files=tuple(files),
    )


def crops(rng: np.random.Generator, stream: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Random pieces of a stream, int32 [batch, length]."""
    starts = rng.integers(0, len(stream) - length, batch)
    return stream[starts[:, None] + np.arange(length)[None]]


def pieces(stream: np.ndarray, batch: int, length: int, most: int) -> Sequence[np.ndarray]:
    """The stream from its start in batches [batch, length], at most so many."""
    count = min(most, len(stream) // (batch * length))
    return list(stream[: count * batch * length].reshape(count, batch, length))


def python_version() -> str:
    """Version of the library that is read."""
    return sys.version.split()[0]
