"""Requests, page table, scheduler, engine and the gRPC server."""
