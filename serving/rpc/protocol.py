"""The generated code of the engine contract; the only module that imports `smg_grpc_proto`.

`messages` and `common` hold the message classes, `Servicer` and `Stub` the two ends of the service.
"""

from __future__ import annotations

import grpc.aio
from smg_grpc_proto.generated import (  # pyright: ignore[reportMissingTypeStubs]
    common_pb2 as common,
)
from smg_grpc_proto.generated import (  # pyright: ignore[reportMissingTypeStubs]
    vllm_engine_pb2 as messages,
)
from smg_grpc_proto.generated import (  # pyright: ignore[reportMissingTypeStubs]
    vllm_engine_pb2_grpc as _services,
)

SERVICE_NAME: str = messages.DESCRIPTOR.services_by_name["VllmEngine"].full_name

Servicer = _services.VllmEngineServicer
Stub = _services.VllmEngineStub


def add_servicer(servicer: Servicer, server: grpc.aio.Server) -> None:
    """Register the engine service on a server."""
    _services.add_VllmEngineServicer_to_server(servicer, server)  # pyright: ignore[reportUnknownMemberType]


__all__ = ["SERVICE_NAME", "Servicer", "Stub", "add_servicer", "common", "messages"]
