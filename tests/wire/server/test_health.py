"""What a node says of itself when it cannot serve, its loop being stuck among the reasons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from kakeya.wire.server.health import NodeHealth
from kakeya.wire.server.watchdog import LoopWatchdog
from tests.wire.server.test_watchdog import get_stuck

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
RUNTIME = "kakeya.v1.RuntimeService"


@asynccontextmanager
async def served(health: NodeHealth) -> AsyncIterator[HealthStub]:
    server = grpc.aio.server()
    add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield HealthStub(channel)
    await server.stop(None)


async def checked(stub: HealthStub, service: str = "", timeout_s: float = 10.0) -> int:
    return (await stub.Check(pb.HealthCheckRequest(service=service), timeout=timeout_s)).status


async def test_each_service_has_its_own_status_and_an_unknown_one_is_not_found() -> None:
    health = NodeHealth()
    async with served(health) as stub:
        assert await checked(stub) == SERVING
        health.set(RUNTIME, serves=False)
        assert await checked(stub, RUNTIME) == NOT_SERVING
        health.set(RUNTIME, serves=True)
        assert await checked(stub, RUNTIME) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await checked(stub, "kakeya.v1.Nothing")
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_hold_covers_every_service_until_all_causes_are_gone() -> None:
    health = NodeHealth()
    health.set(RUNTIME, serves=True)
    health.hold("a", "its name is taken")
    health.hold("b", "it was stuck")
    assert health.reason() == "its name is taken; it was stuck"
    health.release("a")
    assert [health.status(name) for name in ("", RUNTIME)] == [NOT_SERVING] * 2
    health.release("b")
    health.release("never there")
    assert health.reason() == ""
    assert [health.status(name) for name in ("", RUNTIME)] == [SERVING] * 2


async def test_watchers_hear_each_change_and_the_end() -> None:
    health = NodeHealth()
    async with served(health) as stub:
        watch = stub.Watch(pb.HealthCheckRequest(service=RUNTIME), timeout=20)
        heard = [(await watch.read()).status]
        for change in (
            lambda: health.set(RUNTIME, serves=True),
            lambda: health.hold("a", "reason"),
            lambda: health.release("a"),
            health.drain,
        ):
            change()
            heard.append((await watch.read()).status)
        assert heard == [
            pb.HealthCheckResponse.SERVICE_UNKNOWN, SERVING, NOT_SERVING, SERVING, NOT_SERVING,
        ]  # fmt: skip
        assert await watch.read() is grpc.aio.EOF
        health.set(RUNTIME, serves=True)
        assert await checked(stub, RUNTIME) == NOT_SERVING


@pytest.mark.alone
async def test_what_piled_up_on_a_stuck_loop_is_answered_with_not_serving(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Row 3: a deadline while it is stuck, NOT_SERVING until it has run for a while, then again."""
    health = NodeHealth()
    with (tmp_path_factory.mktemp("stacks") / "log").open("w") as file:
        watchdog = LoopWatchdog(
            limit_s=0.2,
            pause_s=0.02,
            calm_s=1.0,
            file=file,
            on_stuck=lambda: health.hold("loop", "the event loop was stuck"),
            on_calm=lambda: health.release("loop"),
        )
        async with served(health) as stub:
            watch = stub.Watch(pb.HealthCheckRequest(service=""), timeout=30)
            assert (await watch.read()).status == SERVING
            with watchdog:
                # The calls are on their way when the loop gets stuck, and wait there for it.
                checks = [asyncio.create_task(checked(stub)) for _ in range(20)]
                await asyncio.sleep(0)
                get_stuck(1.0)
                freed_mono = time.monotonic()
                assert await asyncio.gather(*checks) == [NOT_SERVING] * 20
                assert (await watch.read()).status == NOT_SERVING
                assert (await watch.read()).status == SERVING
                assert time.monotonic() - freed_mono >= 0.9
                assert watchdog.stalls == 1
