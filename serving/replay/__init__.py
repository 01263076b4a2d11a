"""Replay of scripted cache traces on the real page table and scheduler, beside a model of what the
pages hold. The trace format is that of the recorded answers in `tests/data/cache/README.md`."""

from serving.replay.content import ContentModel
from serving.replay.fields import TraceError
from serving.replay.generate import generate
from serving.replay.parse import is_index, parse_trace
from serving.replay.run import Report, Summary, replay, run_workloads
from serving.replay.setup import RECORDED, SERVED, Choices
from serving.replay.trace import Trace
from serving.replay.violations import Violation

__all__ = [
    "RECORDED",
    "SERVED",
    "Choices",
    "ContentModel",
    "Report",
    "Summary",
    "Trace",
    "TraceError",
    "Violation",
    "generate",
    "is_index",
    "parse_trace",
    "replay",
    "run_workloads",
]
