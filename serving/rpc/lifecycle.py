"""Whether the server takes requests, as every kind of health check sees it.

`starting → serving → draining`, and from each of them `failed`. The port is open in all of them:
gateways and probes learn the phase from the answer.
"""

from __future__ import annotations

from typing import Literal

from grpc_health.v1 import health, health_pb2

from serving.engine import Engine
from serving.request import RequestError
from serving.rpc.logs import log_event
from serving.rpc.protocol import SERVICE_NAME

type Phase = Literal["starting", "serving", "draining", "failed"]


class Lifecycle:
    """The phase of the server, and the engine once there is one. Lives on the event loop.

    Attributes:
      phase, message: where the server is, and a sentence about it for people.
      health: the `grpc.health.v1` service, which always agrees with `is_serving`.
    """

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.message = "the model is being loaded"
        self.health = health.aio.HealthServicer()  # pyright: ignore
        self._engine: Engine | None = None

    @property
    def is_serving(self) -> bool:
        """Whether new requests are taken."""
        return self.phase == "serving"

    @property
    def engine(self) -> Engine | None:
        """The engine, from the time that the model is loaded."""
        return self._engine

    def require_engine(self) -> Engine:
        """Return the engine for a new request.

        Raises:
          RequestError: UNAVAILABLE, the server takes none.
        """
        if self._engine is None or not self.is_serving:
            raise RequestError("UNAVAILABLE", f"the server is {self.phase}: {self.message}")
        return self._engine

    async def serve(self, engine: Engine) -> None:
        """Take requests from now on."""
        self._engine = engine
        await self.move(phase="serving", message="ready")

    async def move(self, *, phase: Phase, message: str) -> None:
        """Enter a phase. A failed server stays failed."""
        if self.phase == "failed":
            return
        self.phase, self.message = phase, message
        log_event("phase", phase=phase, message=message)
        await self._publish()

    async def publish(self) -> None:
        """Tell the health service the current phase."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if self.is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self.health.set(service, status)  # pyright: ignore
