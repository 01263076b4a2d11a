"""The end of a process of a group: its last line, and its exit without waiting for anything.

jax's own shutdown waits for all processes, and a thread may hang in a collective for ever, so a
process of a group never returns from its main function.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_SAY_S = 0.5


class Exit:
    """Ends this process once, from whatever thread comes first.

    Args:
      cleanup: called before the last line; bounded in time.
      leave: `os._exit`, except in tests.
    """

    def __init__(
        self,
        *,
        cleanup: Callable[[], None] = lambda: None,
        leave: Callable[[int], None] = os._exit,
    ):
        self._lock = threading.Lock()
        self._cleanup, self._leave = cleanup, leave

    def now(self, code: int, line: str = "") -> NoReturn:
        """Print the last line to stderr and exit."""
        self._lock.acquire()  # and never release it: a second caller waits for the end
        self._cleanup()
        # Nobody may read our output any more, and then writing waits for ever.
        late = threading.Timer(_SAY_S, self._leave, (code,))
        late.daemon = True
        late.start()
        with contextlib.suppress(OSError, ValueError):  # the other end is closed
            sys.stdout.flush()
            if line:
                print(line, file=sys.stderr, flush=True)
        # Nothing may come between: jax is about to abort, with a last line of its own.
        self._leave(code)
        raise SystemExit(code)  # only in tests does `leave` return

    def after(self, seconds: float, code: int, line: str) -> None:
        """Exit so in a while, unless the process has ended by then."""

        def wait() -> None:
            time.sleep(seconds)
            self.now(code, line)

        threading.Thread(target=wait, name="exit", daemon=True).start()
