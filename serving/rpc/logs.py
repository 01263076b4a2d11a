"""Structured logs: one line an event, `time level event field=value ...`.

Field values are numbers, names and messages of ours; never prompts or generated text.
"""

from __future__ import annotations

import json
import logging
import time

_LOGGER = logging.getLogger("serving")
# What every record has; the rest of its attributes are the fields of other modules' events.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({})))


def log_event(event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with its fields."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, event, extra={"fields": fields})


def log_exception(event: str, error: BaseException, **fields: object) -> None:
    """Log an event at level ERROR, with the traceback of its cause."""
    _LOGGER.error(event, exc_info=error, extra={"fields": fields})


def configure_logs(level: str) -> None:
    """Write this project's events of at least `level`, and warnings of others, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOGGER.setLevel(level.upper())


class EventFormatter(logging.Formatter):
    """Formats records of `log_event`, and those of other libraries as an event of their message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, followed by its traceback if it has one."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        fields: dict[str, object] = extra.pop("fields", {}) | extra
        words = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname.lower(), record.getMessage()]
        words += [f"{name}={_value(value)}" for name, value in fields.items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _value(value: object) -> str:
    """A value as one word; text with spaces or quotes is quoted."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=')
    return text if text and plain else json.dumps(text, ensure_ascii=False)
