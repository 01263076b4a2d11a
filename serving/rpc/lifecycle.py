"""Whether the server takes requests, as every kind of health check sees it.

`starting → serving → draining`, and from each of them `failed`. The port is open in all of them:
gateways and probes learn the phase from the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from grpc_health.v1 import health, health_pb2

from serving.engine import Engine
from serving.profiler import Profiler
from serving.request import RequestError
from serving.rpc.logs import log_event
from serving.rpc.protocol import SERVICE_NAME
from serving.scheduler import Limits

Phase = Literal["starting", "serving", "draining", "failed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A loaded model with its engine.

    Attributes:
      page_tokens: tokens in a page of the pool.
      profiler: traces steps of the engine; None where nothing can be traced.
      compilations: how many programs were compiled since the steps were; each held a request up.
    """

    engine: Engine[Any]
    limits: Limits
    page_tokens: int
    profiler: Profiler | None = None
    compilations: Callable[[], int] = lambda: 0


class Lifecycle:
    """The phase of the server, and the engine once there is one. Lives on the event loop.

    Attributes:
      phase, message: where the server is, and a sentence about it for people.
      health: the `grpc.health.v1` service, which always agrees with `is_serving`.
      served: None until the model is loaded.
    """

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.message = "the model is being loaded"
        self.health: Any = health.aio.HealthServicer()  # pyright: ignore
        self.served: Served | None = None

    @property
    def is_serving(self) -> bool:
        """Whether new requests are taken."""
        return self.phase == "serving"

    def require_served(self) -> Served:
        """Return the engine for a new request.

        Raises:
          RequestError: UNAVAILABLE, the server takes none.
        """
        if self.served is None or not self.is_serving:
            raise RequestError("UNAVAILABLE", f"the server is {self.phase}: {self.message}")
        return self.served

    async def move(self, phase: Phase, message: str) -> None:
        """Enter a phase. A failed server stays failed."""
        if self.phase != "failed":
            self.phase, self.message = phase, message
            log_event("phase", phase=phase, message=message)
        await self.publish()

    async def publish(self) -> None:
        """Tell the health service the phase."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if self.is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self.health.set(service, status)
