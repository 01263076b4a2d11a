"""Progress of a load, for whoever wants to show it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

import tqdm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a load is. Bytes are converted bytes of this process's share.

    Attributes:
      reused_bytes: of `done_bytes`, what came from the cache of an earlier load.
      elapsed_s: since the load began.
    """

    done_bytes: int
    total_bytes: int
    reused_bytes: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.done_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0


OnProgress = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """Show nothing."""


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[OnProgress]:
    """A bar with bytes per second on stderr; yields the function to call."""
    with tqdm.tqdm(
        desc=label, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, mininterval=0.5
    ) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total_bytes
            bar.update(progress.done_bytes - bar.n)
            if progress.reused_bytes:
                bar.set_postfix_str(
                    f"{progress.reused_bytes / progress.total_bytes:.0%} from cache", refresh=False
                )

        yield show
