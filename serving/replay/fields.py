"""Reading JSON objects field by field: the first malformed value raises, naming field, value and
expectation."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

type Reader[T] = Callable[[object, str], T]


class TraceError(ValueError):
    """A trace is malformed. The message names the field, its value and what was expected."""

    def __init__(self, field: str, got: object, expected: str):
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field} is malformed: got {shown}; expected {expected}")


class Fields:
    """One JSON object whose fields are taken one by one; `finish` refuses what nobody took.

    Args:
      value: what `json` decoded.
      path: where it stands, for messages; empty for the whole file.
    """

    def __init__(self, value: object, path: str):
        if not isinstance(value, dict):
            raise TraceError(path or "the file", value, "an object")
        self._fields: dict[str, object] = dict(cast("dict[str, object]", value))
        self._path = path

    def take[T](self, name: str, read: Reader[T]) -> T:
        """A field that must be there."""
        path = self.path(name)
        if name not in self._fields:
            raise TraceError(path, None, "the field to be present")
        return read(self._fields.pop(name), path)

    def take_or[T, D](self, name: str, read: Reader[T], default: D) -> T | D:
        """A field that may be missing."""
        return self.take(name, read) if name in self._fields else default

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def ignore(self, *names: str) -> None:
        """Accept fields that mean nothing to the reader."""
        for name in names:
            self._fields.pop(name, None)

    def finish(self) -> None:
        for name, value in self._fields.items():
            raise TraceError(self.path(name), value, "no such field")


def anything(value: object, path: str) -> object:
    return value


def integer(least: int, most: int | None = None) -> Reader[int]:
    expected = f"an integer >= {least}" if most is None else f"an integer in {least}..{most}"

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TraceError(path, value, expected)
        if value < least or (most is not None and value > most):
            raise TraceError(path, value, expected)
        return value

    return read


def fraction(value: object, path: str) -> float:
    expected = "a number >= 0 and below 1"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TraceError(path, value, expected)
    if not 0.0 <= value < 1.0:
        raise TraceError(path, value, expected)
    return float(value)


def boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise TraceError(path, value, "true or false")
    return value


def text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise TraceError(path, value, "a string")
    return value


def name(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise TraceError(path, value, "a string that is not empty")
    return value


def one_of(*options: str | int) -> Reader[str | int]:
    def read(value: object, path: str) -> str | int:
        for option in options:
            if type(value) is type(option) and value == option:
                return option
        raise TraceError(path, value, f"one of {', '.join(map(repr, options))}")

    return read


def optional[T](read: Reader[T]) -> Reader[T | None]:
    return lambda value, path: None if value is None else read(value, path)


def list_of[T](read: Reader[T]) -> Reader[tuple[T, ...]]:
    def read_list(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise TraceError(path, value, "a list")
        items = cast("list[object]", value)
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(items))

    return read_list


def map_of[T](read: Reader[T]) -> Reader[dict[str, T]]:
    def read_map(value: object, path: str) -> dict[str, T]:
        if not isinstance(value, dict):
            raise TraceError(path, value, "an object")
        items = cast("dict[str, object]", value)
        return {key: read(item, f"{path}.{key}") for key, item in items.items()}

    return read_map


def row_of(*readers: Reader[object]) -> Reader[tuple[object, ...]]:
    """A list of fixed length."""

    def read(value: object, path: str) -> tuple[object, ...]:
        items = list_of(anything)(value, path)
        if len(items) != len(readers):
            raise TraceError(path, value, f"a list of {len(readers)} values")
        return tuple(
            reader(item, f"{path}[{index}]")
            for index, (reader, item) in enumerate(zip(readers, items, strict=True))
        )

    return read
