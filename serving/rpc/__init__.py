"""The gRPC front of the engine: the service of `protocol.SERVICE_NAME`, health and reflection."""
