"""What holds for all operators that are traced inside a `with using(...)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSettings:
    """How operators choose and launch their kernels.

    | field | meaning |
    |---|---|
    | `order` | implementations that an automatic choice tries, in order |
    | `pdl` | kernels for Hopper use programmatic dependent launch: a kernel starts while the one |
    | | before it still runs, loads weights and states, and waits for it only then |
    """

    order: tuple[str, ...] = ("mosaic", "triton", "xla")
    pdl: bool = False


_DEFAULT = KernelSettings()
_current: ContextVar[KernelSettings] = ContextVar("kernel_settings", default=_DEFAULT)


def current() -> KernelSettings:
    """Settings of the code that is being traced."""
    return _current.get()


@contextmanager
def using(settings: KernelSettings) -> Iterator[None]:
    """Trace the body with these settings. What was traced before keeps its own."""
    token = _current.set(settings)
    try:
        yield
    finally:
        _current.reset(token)
