"""The safetensors format: strict header reader, ranged reads, and a writer. NumPy only.

A file is an 8-byte little-endian header length, a JSON header, then the tensors back to back. The
header must account for every byte of the file, so a cut or overwritten file is found before a
weight is read (KF-L01).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3jax.weights.errors import Problem, ProblemKind, WeightError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
      dtype: code of the format, a key of `DTYPES`.
      offset: of its first byte in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one file.

    Returns:
      Its tensors by name, in the order in which they lie.

    Raises:
      WeightError: the file breaks the format, is shorter or longer than its header promises, or
        names a tensor twice. The error names the file and, for a short one, the number of missing
        bytes.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise _bad(
                file,
                "truncated",
                f"is cut: got {file_bytes} bytes; {8 - len(start)} bytes are missing",
            )
        (header_bytes,) = struct.unpack("<Q", start)
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise _bad(
                file, "header",
                f"has no safetensors header: got a length of {header_bytes}; expected "
                f"2..{MAX_HEADER_BYTES}",
            )  # fmt: skip
        text = stream.read(header_bytes)
    if len(text) < header_bytes:
        raise _bad(
            file, "truncated",
            f"is cut in its header: got {file_bytes} bytes; at least {header_bytes - len(text)} "
            f"bytes are missing",
        )  # fmt: skip
    entries = _entries(file, _parse_json(file, text), data_start=8 + header_bytes)
    _check_layout(file, entries, data_start=8 + header_bytes, file_bytes=file_bytes)
    return entries


class TensorFiles:
    """Open files of a checkpoint, read by several threads. Each file is opened once, at its first
    read."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def read_rows(self, entry: TensorEntry, start: int, out: np.ndarray) -> None:
        """Fill `out` with consecutive rows of a tensor.

        Args:
          entry: the tensor, seen as rows of `out.shape[1:]` elements.
          start: first row.
          out: C-contiguous, of the stored dtype.

        Raises:
          WeightError: the file ends early; it was changed after its header had been checked.
        """
        row_bytes = math.prod(out.shape[1:]) * out.dtype.itemsize
        view = memoryview(out.reshape(-1).view(np.uint8))
        offset = entry.offset + start * row_bytes
        if not read_exactly(self._descriptor(entry.file), view, offset):
            raise WeightError(
                Problem(
                    kind="truncated",
                    file=entry.file.name,
                    tensor=entry.name,
                    message=f"{entry.file} ended inside tensor {entry.name}: the file was cut "
                    f"while it was read",
                )
            )

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


def read_exactly(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fill `view` from the file; false if the file ends first. Safe to call from several
    threads."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def parse_unique(text: bytes) -> tuple[Any, list[str]]:
    """Parse JSON.

    Returns:
      The value, and the keys that an object holds more than once: JSON readers keep the last one in
        silence.

    Raises:
      ValueError: not JSON.
    """
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return mapping

    return json.loads(text, object_pairs_hook=collect), repeated


def duplicate(name: str, first: TensorEntry, second: TensorEntry) -> Problem:
    """The problem of a tensor that two entries hold."""
    return Problem(
        kind="duplicate_tensor",
        file=second.file.name,
        tensor=name,
        message=f"tensor {name} is there twice: got {first.name} in {first.file} and {second.name} "
        f"in "
        f"{second.file}; expected it once",
    )


def write_file(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors to one file, in the given order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def _bad(file: Path, kind: ProblemKind, what: str, tensor: str | None = None) -> WeightError:
    return WeightError(Problem(kind=kind, file=file.name, tensor=tensor, message=f"{file} {what}"))


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header, repeated = parse_unique(text)
    except ValueError as error:
        raise _bad(file, "header", f"has a header that is not JSON: {error}") from None
    if repeated:
        raise _bad(
            file, "duplicate_tensor", f"holds tensor {repeated[0]} twice; expected every name once", repeated[0]
        )  # fmt: skip
    if not isinstance(header, dict):
        raise _bad(
            file, "header", f"has a wrong header: got {type(header).__name__}; expected an object"
        )
    return header


def _entries(file: Path, header: dict[str, Any], *, data_start: int) -> dict[str, TensorEntry]:
    """The tensors of a parsed header, by offset. Checks each entry alone."""
    entries: list[TensorEntry] = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise _bad(
                file, "header",
                f"has a malformed entry for {name}: got {value!r}; expected dtype, shape and "
                f"data_offsets", name,
            ) from None  # fmt: skip
        if not isinstance(shape, list) or not all(map(_is_count, [*shape, begin, end])):
            raise _bad(
                file, "header",
                f"has a malformed entry for {name}: got {value!r}; expected sizes that are whole "
                f"numbers >= 0", name,
            )  # fmt: skip
        if dtype not in DTYPES:
            raise _bad(
                file, "header",
                f"has an unknown dtype for {name}: got {dtype!r}; expected one of "
                f"{sorted(DTYPES)}", name,
            )  # fmt: skip
        entry = TensorEntry(name, file, dtype, tuple(shape), data_start + begin)
        if entry.num_bytes != end - begin:
            raise _bad(
                file, "header",
                f"has wrong offsets for {name}: got {end - begin} bytes; expected "
                f"{entry.num_bytes} for "
                f"{dtype} {shape}", name,
            )  # fmt: skip
        entries.append(entry)
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    return {entry.name: entry for entry in entries}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_layout(
    file: Path, entries: Mapping[str, TensorEntry], *, data_start: int, file_bytes: int
) -> None:
    """Tensors lie back to back and fill the file."""
    position = data_start
    for entry in entries.values():
        if entry.offset != position:
            word = "overlaps the tensor before it" if entry.offset < position else "leaves a gap"
            raise _bad(
                file, "header",
                f"has wrong offsets: tensor {entry.name} {word}: got byte {entry.offset}; expected "
                f"{position}",
                entry.name,
            )  # fmt: skip
        position += entry.num_bytes
    if file_bytes < position:
        cut = next(e for e in entries.values() if e.offset + e.num_bytes > file_bytes)
        raise _bad(
            file, "truncated",
            f"is cut in tensor {cut.name}: got {file_bytes} bytes; expected {position}; "
            f"{position - file_bytes} "
            "bytes are missing; fetch the file again", cut.name,
        )  # fmt: skip
    if file_bytes > position:
        raise _bad(
            file, "header",
            f"is longer than its header says: got {file_bytes} bytes; expected {position}",
        )  # fmt: skip
