"""A cache of converted pieces with a journal, so that a killed load goes on where it stopped.

Each process keeps two files under `cache_dir/<key>`: all its pieces one after the other, and a
journal with one line for each finished piece. A line is written after the piece's bytes are on
disk, and carries their checksum: what is read back is either right or read again from the
checkpoint. The key covers everything that decides the bytes, so another checkpoint, dtype, mesh or
version of this code never meets these files. Folders of other keys are left alone.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.weights.errors import refusal
from k3jax.weights.folder import checkpoint_files
from k3jax.weights.plan import Piece
from k3jax.weights.safetensors_file import byte_view, read_exactly

# Raised whenever the meaning of the cached bytes changes.
FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A line of the journal: a piece whose bytes are in the data file."""

    piece: int
    offset: int
    num_bytes: int
    crc32: int


class PieceCache:
    """The files of one load.

    Reader threads fetch and store pieces, one thread commits them. Invariant: the journal names a
    piece only if its bytes were on disk before.
    """

    def __init__(self, folder: Path, key: str, pieces: tuple[Piece, ...]):
        """Open or create the files.

        Raises:
          WeightError: another process loads into this cache, or the disk has no room for it.
        """
        stem = f"process-{jax.process_index()}-of-{jax.process_count()}"
        self._pieces = pieces
        num_bytes = sum(piece.num_bytes for piece in pieces)
        header = {"format": FORMAT, "key": key, "pieces": len(pieces), "bytes": num_bytes}
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = os.open(folder / f"{stem}.journal", os.O_RDWR | os.O_CREAT, 0o644)
        self._data = os.open(folder / f"{stem}.weights", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(folder)
            self._reserve(folder, num_bytes)
            self._records = self._restore(header)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PieceCache:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._journal)
        self.close()

    @property
    def is_complete(self) -> bool:
        """True if every piece was finished by earlier loads."""
        return len(self._records) == len(self._pieces)

    def close(self) -> None:
        """Close the files, which also gives up the lock."""
        os.close(self._journal)
        os.close(self._data)

    def fetch(self, piece: Piece) -> tuple[np.ndarray, ...] | None:
        """The blocks of a finished piece, or None if there is none or its bytes are damaged."""
        record = self._records.get(piece.index)
        if record is None:
            return None
        blocks = tuple(np.empty(piece.shape, piece.leaf.dtype) for _ in piece.leaf.shard_starts)
        offset, crc32 = record.offset, 0
        for block in blocks:
            view = byte_view(block)
            if not read_exactly(self._data, view, offset):
                return None
            crc32 = zlib.crc32(view, crc32)
            offset += len(view)
        return blocks if crc32 == record.crc32 else None

    def store(self, piece: Piece, blocks: tuple[np.ndarray, ...]) -> Record:
        """Bring the blocks of a piece to disk."""
        offset, crc32 = piece.offset, 0
        for block in blocks:
            view = byte_view(block)
            _write_exactly(self._data, view, offset)
            crc32 = zlib.crc32(view, crc32)
            offset += len(view)
        os.fdatasync(self._data)
        return Record(piece.index, piece.offset, piece.num_bytes, crc32)

    def commit(self, record: Record) -> None:
        """Append a stored piece to the journal."""
        line = json.dumps(dataclasses.asdict(record)) + "\n"
        _write_exactly(self._journal, memoryview(line.encode()), self._journal_end)
        self._journal_end += len(line)
        self._records[record.piece] = record

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise refusal(
                "cache",
                f"weight cache is in use: {folder} is locked by another load; "
                "wait for it or choose another folder",
                folder,
            ) from None

    def _reserve(self, folder: Path, num_bytes: int) -> None:
        """Give the data file its full size; it stays sparse until pieces are stored."""
        needed = num_bytes - os.fstat(self._data).st_blocks * 512
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise refusal(
                "cache",
                f"weight cache does not fit on the disk of {folder}: got {free} bytes free; "
                f"expected {needed}; choose another folder or load without a cache",
                folder,
            )
        if os.fstat(self._data).st_size != num_bytes:
            os.ftruncate(self._data, 0)
            os.ftruncate(self._data, num_bytes)
            os.ftruncate(self._journal, 0)

    def _restore(self, header: dict[str, Any]) -> dict[int, Record]:
        """Read the journal up to its first damaged line, and cut it there."""
        first = json.dumps(header) + "\n"
        lines = _read_all(self._journal).decode(errors="replace").splitlines(keepends=True)
        if not lines or lines[0] != first:
            os.ftruncate(self._journal, 0)
            _write_exactly(self._journal, memoryview(first.encode()), 0)
            self._journal_end = len(first)
            return {}
        records: dict[int, Record] = {}
        self._journal_end = len(first)
        for line in lines[1:]:
            record = _parse(line, self._pieces)
            if record is None:
                break
            records[record.piece] = record
            self._journal_end += len(line)
        os.ftruncate(self._journal, self._journal_end)
        return records


def cache_key(model_dir: Path, pieces: tuple[Piece, ...]) -> str:
    """Identify the bytes of a cache: the checkpoint's files, how they are cut and where they go.

    Raises:
      WeightError: a file of the checkpoint is missing.
    """
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    for file in checkpoint_files(model_dir):
        try:
            status = file.stat()
        except OSError as error:
            message = f"{file} cannot be read: got {error.strerror}; the checkpoint needs it"
            raise refusal("missing_file", message, file) from None
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        if file.suffix == ".json":
            digest.update(file.read_bytes())
    for leaf in dict.fromkeys(piece.leaf for piece in pieces):
        digest.update(
            f"{leaf.label} {leaf.spec} {leaf.dtype} {leaf.local_shape} {leaf.shard_starts}".encode()
        )
    for piece in pieces:
        digest.update(f"{piece.leaf.label} {piece.start} {piece.shape}".encode())
    return digest.hexdigest()[:32]


def _parse(line: str, pieces: tuple[Piece, ...]) -> Record | None:
    """A whole line that fits the plan, or None."""
    if not line.endswith("\n"):
        return None
    try:
        record = Record(**json.loads(line))
        piece = pieces[record.piece]
    except (ValueError, TypeError, IndexError):
        return None
    got = (record.piece, record.offset, record.num_bytes)
    return record if got == (piece.index, piece.offset, piece.num_bytes) else None


def _read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _write_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
