"""Choice of implementation: one table of names, one immutable `Op` per operator, one `run`.

An implementation refuses arguments that it cannot take by raising `NotImplementedError(reason)`
while it is traced. `implementation=None` takes that of `KernelSettings` if the operator has it, or
else the first of `AUTOMATIC_ORDER` that is registered, is not `Op.unproven` for the arguments, and
does not refuse.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels import settings
from pallas_kernels.settings import IMPLEMENTATIONS

AUTOMATIC_ORDER = ("mosaic", "triton", "xla")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operator: its public name and its implementations, all of one signature.

    `unproven` has functions of the same signature, for some implementations. One returns why an
    automatic choice passes its implementation over: nothing shows that it is faster. A call by name
    does not ask.

    Raises:
      ValueError: an implementation has a name outside `IMPLEMENTATIONS`.
    """

    name: str
    implementations: Mapping[str, Callable[..., Any]]
    unproven: Mapping[str, Callable[..., str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.implementations) - set(IMPLEMENTATIONS))
        if unknown:
            raise ValueError(
                f"{self.name}: implementation names are wrong: got {unknown}; "
                f"expected names out of {IMPLEMENTATIONS}; add new names to that table"
            )

    def passed_over(self, name: str, *args: Any, **kwargs: Any) -> str | None:
        """Why an automatic choice does not take an implementation for these arguments."""
        return self.unproven[name](*args, **kwargs) if name in self.unproven else None


def run(op: Op, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Call `op` with the named implementation, or with one that is chosen as the module says.

    Raises:
      ValueError: the name is unknown, or the operator has no implementation of that name.
      NotImplementedError: every candidate refused; the message gives the reason of each.
    """
    if implementation is not None and implementation not in op.implementations:
        kind = (
            "not registered for this operator" if implementation in IMPLEMENTATIONS else "unknown"
        )
        raise ValueError(
            f"{op.name}: implementation is {kind}: got {implementation!r}; "
            f"expected one of {sorted(op.implementations)} or None; pass None to choose"
        )
    preferred = settings.current().implementation
    if implementation is None and preferred in op.implementations:
        implementation = preferred
    refusals: dict[str, str] = {}
    for name in AUTOMATIC_ORDER if implementation is None else (implementation,):
        if name not in op.implementations:
            refusals[name] = "not registered"
            continue
        if implementation is None and (reason := op.passed_over(name, *args, **kwargs)):
            refusals[name] = reason
            continue
        try:
            result = op.implementations[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusals[name] = str(refusal) or "no reason given"
            continue
        if implementation is None:
            _log_choice(op.name, name, tuple(refusals.items()))
        return result
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(
        f"{op.name}: no implementation takes these arguments: got refusals from {reasons}; "
        f"expected one that accepts; change the arguments or the implementation"
    )


@functools.cache
def _log_choice(op: str, name: str, refusals: tuple[tuple[str, str], ...]) -> None:
    """Log an automatic choice; the cache makes each distinct choice one line per process."""
    passed_over = "; ".join(f"{other}: {reason}" for other, reason in refusals)
    _log.info("kernel_selected op=%s implementation=%s passed_over=[%s]", op, name, passed_over)
