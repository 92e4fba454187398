"""Channels and the error-to-status tables: how Kakeya speaks gRPC, whatever the service."""
