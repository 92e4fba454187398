"""A real RuntimeService on a real port, over the hash model."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.prefix.seam import NoPrecache
from kakeya.sessions.client import Client
from kakeya.sessions.service import RuntimeService
from kakeya.sessions.store import SessionLimits, SessionStore
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceStub, add_RuntimeServiceServicer_to_server
from kakeya.wire.channels import Keepalive
from tests.sessions.toy import HashServedModel, ToyDirectory, ToyRouter


@dataclass
class Node:
    service: RuntimeService
    store: SessionStore
    model: HashServedModel
    router: ToyRouter
    client: Client
    stub: RuntimeServiceStub
    address: str
    server: grpc.aio.Server


@asynccontextmanager
async def running_node(model=None, clock=None, precache=None, **limits):
    model = model or HashServedModel()
    clock = clock or SystemClock()
    router = ToyRouter()
    store = SessionStore(clock=clock, rng=random.Random(1), limits=SessionLimits(**limits))
    service = RuntimeService(
        models=ToyDirectory((model,)),
        drafts=router,
        store=store,
        clock=clock,
        rng=random.Random(2),
        precache=precache or NoPrecache(),
    )
    server = grpc.aio.server(options=Keepalive().server_options())
    add_RuntimeServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with service, Client(address) as client, grpc.aio.insecure_channel(address) as channel:
        try:
            yield Node(
                service, store, model, router, client, RuntimeServiceStub(channel), address, server
            )
        finally:
            await server.stop(0)


@pytest.fixture
async def node():
    async with running_node() as running:
        yield running
