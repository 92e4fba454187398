"""Nodes that have models on their disks and speak WeightsService over real gRPC, in one process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio

from kakeya.core.clock import SystemClock
from kakeya.v1 import weights_pb2 as pb
from kakeya.v1.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from kakeya.weights.config import WeightsConfig
from kakeya.weights.progress import PullState
from kakeya.weights.service import WeightsService
from kakeya.weights.weights import NodeWeights
from kakeya.wire.channels import Channels, message_options


@dataclass
class Plane:
    """The fleet of one node: all others that were added."""

    node_id: str
    channels: Channels
    cards: dict[str, Any] = field(default_factory=dict)

    @property
    def registry(self) -> Any:
        others = [card for name, card in self.cards.items() if name != self.node_id]
        return SimpleNamespace(node_id=self.node_id, live_peers=lambda mono: others)

    @property
    def routes(self) -> Any:
        return SimpleNamespace(address_for=lambda card: card.grpc_address)

    def why_not_dial(self, address: str) -> str:
        return ""


@dataclass
class Mini:
    """One node: its models, its server, its folder."""

    weights: NodeWeights
    server: grpc.aio.Server
    address: str
    folder: Path
    loaded: set[str] = field(default_factory=set)
    configured: dict[str, str] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)
    """The number of fetches at each change of it."""

    async def pull(self, name: str, *, from_node: str = "", keep: bool = False) -> PullState:
        """Pull to the end; the last state."""
        states = self.weights.pull(name, from_node=from_node, keep=keep)
        return [state async for state in states][-1]

    async def know(self) -> None:
        """Have all digests."""
        for model in await self.weights.index.models(anew=True):
            await self.weights.index.manifest(model)


class House:
    """Nodes that know each other."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.cards: dict[str, Any] = {}
        self.minis: dict[str, Mini] = {}

    async def add(self, name: str, service: Any = None, **settings: Any) -> Mini:
        """A node; `service` makes the one for its peers of its models, instead of the usual."""
        folder = self._folder / name
        (folder / "models").mkdir(parents=True, exist_ok=True)
        channels = Channels()
        self._stack.push_async_callback(channels.aclose)
        server = grpc.aio.server(options=message_options())
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        loaded: set[str] = set()
        configured: dict[str, str] = {}
        told: list[int] = []
        weights = NodeWeights(
            WeightsConfig(**settings),
            Plane(name, channels, self.cards),
            data_dir=folder,
            hub=None,
            configured=lambda: configured,
            loaded=lambda: loaded,
            on_change=lambda: told.append(len(weights.fetching)),
            clock=SystemClock(),
        )
        self._stack.push_async_callback(weights.aclose)
        if service is None:
            weights.register(server)
        else:
            add_WeightsServiceServicer_to_server(service(weights), server)
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        self.cards[name] = SimpleNamespace(
            node_id=name, label=name, is_extended=True, grpc_address=address
        )
        mini = self.minis[name] = Mini(
            weights, server, address, folder / "models", loaded, configured, told
        )
        return mini


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(folder, stack)


def make_model(folder: Path, name: str, *, mib: float = 14.3, seed: int = 1) -> Path:
    """A model folder with random weights in two files, and small files."""
    path = folder / name
    path.mkdir(parents=True)
    draw = random.Random(seed)
    size = int(mib * 1024 * 1024)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "empty.txt").touch()
    (path / "model-00001-of-00002.safetensors").write_bytes(draw.randbytes(size * 2 // 3))
    (path / "model-00002-of-00002.safetensors").write_bytes(draw.randbytes(size // 3))
    (path / "secret.pem").write_text("not a part of a model")
    return path


def content(folder: Path) -> dict[str, bytes]:
    """The files of a model by name, without what no node sends."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".pem"
    }


def changed(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same number of bytes, one of them wrong."""
    for data in parts:
        yield bytes([data[0] ^ 1]) + data[1:]


class Faulty(WeightsService):
    """A peer with a fault in what it sends of a piece."""

    fault = "wrong"
    served = 0

    async def ReadPiece(self, request: pb.ReadPieceRequest, context: Any) -> None:
        data = b""
        while part := await self._read(request.digest, request.piece, len(data)):
            data += part
        type(self).served += 1
        match self.fault:
            case "wrong":
                data = bytes([data[0] ^ 1]) + data[1:]
            case "short":
                data = data[:-1]
            case "long":
                data += b"more"
            case "dies":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        for at in range(0, len(data), 1 << 20):
            await context.write(pb.PiecePart(data=data[at : at + (1 << 20)]))
