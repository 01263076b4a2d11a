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

from k3jax.weights.errors import Problem, WeightError, refusal

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
        names a tensor twice. The error names the file and, for a short one, the missing bytes.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise refusal("truncated", f"{file} is cut: {8 - len(start)} bytes are missing", file)
        (header_bytes,) = struct.unpack("<Q", start)
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise _malformed(
                file, f"length of the header: got {header_bytes}; expected 2..{MAX_HEADER_BYTES}"
            )
        text = stream.read(header_bytes)
    if len(text) < header_bytes:
        missing = header_bytes - len(text)
        raise refusal("truncated", f"{file} is cut: at least {missing} bytes are missing", file)
    entries = _entries(file, _parse_header(file, text), data_start=8 + header_bytes)
    _check_layout(file, entries, data_start=8 + header_bytes, file_bytes=file_bytes)
    return entries


class TensorFiles:
    """Open files of a checkpoint, each opened at its first read. Used by several threads."""

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
          out: C-contiguous, of the stored item size.

        Raises:
          WeightError: the file ends early: it was changed after its header had been checked.
        """
        row_bytes = math.prod(out.shape[1:]) * out.dtype.itemsize
        offset = entry.offset + start * row_bytes
        if not read_exactly(self._descriptor(entry.file), byte_view(out), offset):
            raise refusal(
                "truncated",
                f"{entry.file} ended inside tensor {entry.name}: it was cut while it was read",
                entry.file,
                entry.name,
            )

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


def read_exactly(descriptor: int, view: memoryview, offset: int) -> bool:
    """Fill `view` from a file; false if the file ends first. Leaves the file's position alone."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def byte_view(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array; `memoryview` itself does not know bfloat16."""
    return memoryview(array.reshape(-1).view(np.uint8))


def parse_unique(text: bytes) -> tuple[Any, list[str]]:
    """Parse JSON, and note keys that an object repeats: readers keep the last one in silence.

    Returns:
      The value, and the repeated keys.

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


def duplicate(first: TensorEntry, second: TensorEntry) -> Problem:
    """The problem of two stored tensors that are one."""
    return Problem(
        "duplicate_tensor",
        f"tensor {second.name} is there twice: got {first.name} in {first.file} and {second.name} "
        f"in {second.file}; expected it once",
        second.file,
        second.name,
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


def _malformed(file: Path, what: str, tensor: str | None = None) -> WeightError:
    return refusal("header", f"{file} has a malformed header: {what}", file, tensor)


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header, repeated = parse_unique(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(file, f"it is not JSON: {error}") from None
    if repeated:
        name = repeated[0]
        message = f"{file} holds tensor {name} twice; expected every name once"
        raise refusal("duplicate_tensor", message, file, name)
    if not isinstance(header, dict):
        raise _malformed(file, f"got {type(header).__name__}; expected an object")
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
            expected = "expected dtype, shape and data_offsets"
            raise _malformed(file, f"entry {name}: got {value!r}; {expected}", name) from None
        if not isinstance(shape, list) or not all(map(_is_count, [*shape, begin, end])):
            expected = "expected whole numbers >= 0"
            raise _malformed(file, f"entry {name}: got {value!r}; {expected}", name)
        if dtype not in DTYPES:
            expected = f"expected one of {sorted(DTYPES)}"
            raise _malformed(file, f"dtype of {name} is unknown: got {dtype!r}; {expected}", name)
        entry = TensorEntry(name, file, dtype, tuple(shape), data_start + begin)
        if entry.num_bytes != end - begin:
            expected = f"expected {entry.num_bytes} for {dtype} {shape}"
            raise _malformed(file, f"size of {name}: got {end - begin} bytes; {expected}", name)
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
            word = "overlaps the one before it" if entry.offset < position else "leaves a gap"
            got = f"got byte {entry.offset}; expected {position}"
            raise _malformed(file, f"tensor {entry.name} {word}: {got}", entry.name)
        position += entry.num_bytes
    if file_bytes < position:
        cut = next(e for e in entries.values() if e.offset + e.num_bytes > file_bytes)
        raise refusal(
            "truncated",
            f"{file} is cut in tensor {cut.name}: got {file_bytes} bytes; expected {position}; "
            f"{position - file_bytes} bytes are missing; fetch the file again",
            file,
            cut.name,
        )
    if file_bytes > position:
        raise _malformed(file, f"got a file of {file_bytes} bytes; expected {position}")
