"""What holds for all operators that are traced inside a `with using(...)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

IMPLEMENTATIONS = ("reference", "xla", "mosaic", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSettings:
    """How operators choose and launch their kernels.

    | field | meaning |
    |---|---|
    | `implementation` | taken by every operator that has it, unless a call names another: if it |
    | | refuses, that is an error; None chooses automatically |
    | `pdl` | kernels for Hopper use programmatic dependent launch: a kernel starts while the one |
    | | before it still runs, loads weights and states, and waits for it only then |
    """

    implementation: str | None = None
    pdl: bool = False


AUTOMATIC = KernelSettings()
_current: ContextVar[KernelSettings] = ContextVar("kernel_settings", default=AUTOMATIC)


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
