"""Profiles of a running server: a trace of some of its steps.

The engine's executor is wrapped in one that counts steps. A trace begins in front of the step that
was asked for, in the engine's thread, and ends in a thread of its own once the last step's result
is there, so that writing it does not hold up serving.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from serving.plan import GroupPlan, GroupResult
from serving.request import RequestError

if TYPE_CHECKING:
    from serving.engine import Executor

logger = logging.getLogger(__name__)


class ProfilerStateError(Exception):
    """A profile is being taken already, or none is."""


class Tracer(Protocol):
    """What records a trace. One at a time."""

    def start(self, folder: Path, *, with_python: bool) -> None:
        """Begin to record into a folder.

        Args:
          with_python: record Python calls too, which slows the host down.
        """
        ...

    def stop(self) -> None:
        """End the record and write it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What to trace.

    Attributes:
      folder: below the profiler's.
      start_step: steps of the engine from now on that are left out.
      num_steps: steps to trace; None goes on until `stop`.
    """

    folder: Path
    start_step: int = 0
    num_steps: int | None = None
    with_python: bool = False


class Profiler:
    """Takes one profile at a time. Methods may be called in any thread.

    Args:
      root: all traces are written below it.
    """

    def __init__(self, root: Path, tracer: Tracer):
        self._root = root.resolve()
        self._tracer = tracer
        self._lock = threading.Lock()
        self._profile: Profile | None = None
        self._waits = 0  # steps until the trace begins
        self._left: int | None = None  # steps that are still to be dispatched in the trace
        self._is_tracing = self._is_writing = False

    def start(
        self,
        *,
        output_dir: str = "",
        start_step: int = 0,
        num_steps: int | None = None,
        with_python: bool = False,
    ) -> Profile:
        """Trace steps from now on.

        Args:
          output_dir: folder below the root, relative to it or whole; empty is the root.

        Raises:
          RequestError: a value is out of range.
          ProfilerStateError: another profile is being taken, or written.
        """
        folder = (self._root / output_dir).resolve()
        if not folder.is_relative_to(self._root):
            raise _invalid("output_dir", output_dir, f"a folder below {self._root}")
        if start_step < 0:
            raise _invalid("start_step", start_step, ">= 0")
        if num_steps is not None and num_steps < 1:
            raise _invalid("num_steps", num_steps, ">= 1")
        profile = Profile(
            folder=folder, start_step=start_step, num_steps=num_steps, with_python=with_python
        )
        with self._lock:
            if self._profile is not None:
                raise ProfilerStateError(f"a profile is being taken into {self._profile.folder}")
            if self._is_writing:
                raise ProfilerStateError("the last profile is being written")
            folder.mkdir(parents=True, exist_ok=True)
            self._profile, self._waits, self._left = profile, start_step, num_steps
        return profile

    def stop(self) -> Path | None:
        """End the profile and write it; return its folder, or None if it had not begun.

        Raises:
          ProfilerStateError: none is being taken.
        """
        with self._lock:
            if self._profile is None:
                raise ProfilerStateError("no profile is being taken")
            profile, self._profile = self._profile, None
            self._is_writing, self._is_tracing = self._is_tracing, False
        if not self._is_writing:
            return None
        try:
            self._tracer.stop()  # takes seconds
        finally:
            self._is_writing = False
        return profile.folder

    def dispatching(self) -> bool:
        """Note that a step is about to be dispatched; whether it is the trace's last one."""
        if self._profile is None:  # without the lock: almost always so
            return False
        with self._lock:
            return self._note_step()

    def collected_last(self) -> None:
        """Write the trace in another thread: its last step is done."""
        threading.Thread(target=self._finish, name="profiler", daemon=True).start()

    def _note_step(self) -> bool:
        if self._profile is None or self._left == 0:
            return False
        if self._waits:
            self._waits -= 1
            return False
        if not self._is_tracing:
            self._begin(self._profile)
        if self._left is None:
            return False
        self._left -= 1
        return self._left == 0

    def _begin(self, profile: Profile) -> None:
        try:
            self._tracer.start(profile.folder, with_python=profile.with_python)
            self._is_tracing = True
        except Exception:  # whatever it is, it ends the profile and not the server
            logger.exception("profile_failed")
            self._profile = None

    def _finish(self) -> None:
        try:
            folder = self.stop()
        except ProfilerStateError:
            return  # a client was faster
        except Exception:
            logger.exception("profile_failed")
            return
        logger.info("profile_written", extra={"fields": {"folder": folder}})


class ProfiledExecutor[Handle]:
    """An executor whose steps a profiler can trace. Used by the engine's thread only."""

    def __init__(self, executor: Executor[Handle], profiler: Profiler):
        self._executor, self._profiler = executor, profiler
        self._ends_trace: collections.deque[bool] = collections.deque()  # of steps in flight

    def dispatch(self, plan: GroupPlan) -> Handle:
        """Start a step."""
        self._ends_trace.append(self._profiler.dispatching())
        return self._executor.dispatch(plan)

    def collect(self, handle: Handle) -> GroupResult:
        """Wait for a step's result."""
        result = self._executor.collect(handle)
        if self._ends_trace.popleft():
            self._profiler.collected_last()
        return result


def _invalid(field: str, value: object, expected: str) -> RequestError:
    return RequestError("INVALID_ARGUMENT", f"{field} is wrong: got {value!r}; expected {expected}")
