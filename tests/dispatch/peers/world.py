"""A node's models for its peers, without engines: toy models behind a real server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio

from kakeya.core.errors import Denied, InvalidArgument, KakeyaError, NotFound
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.peers.client import PeerCalls
from kakeya.dispatch.peers.held_answers import HeldAnswers
from kakeya.dispatch.peers.service import ServingService
from kakeya.dispatch.peers.text_files import TextFiles
from kakeya.fleet.placement.keepers import Keeping
from kakeya.generation.facts import ModelFacts, PromptsAlike, RequestLoad
from kakeya.generation.frames import Frame
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait
from kakeya.prefix.seam import (
    NoPrecache,
    PrefixClaim,
    TokenSource,
    Warmed,
    WarmOutcome,
    WarmReport,
)
from kakeya.prefix.warm.for_peers import PeerPrefix
from kakeya.v1 import serving_pb2 as pb
from kakeya.v1.serving_pb2_grpc import add_ServingServiceServicer_to_server
from tests.fakes import FakeClock
from tests.sessions.toy import EOS, VOCAB, HashServedModel, ToyRouter


def facts_of(model_id: str = "toy", **others: object) -> ModelFacts:
    known: dict[str, object] = {
        "model_path": "",
        "vocab_size": VOCAB,
        "context_tokens": 10_000,
        "eos_token_ids": (EOS,),
        "vocabulary_digest": "words",
        "base_fingerprint": "weights",
        "kv_exactness": "numerics",
        "kv_block_tokens": 64,
        "prefill_tokens_per_second": 1000.0,
        "tokens_per_second": 100.0,
        "prefill_chunk_tokens": 128,
    }
    return ModelFacts(model_id=model_id, **(known | others))  # type: ignore[arg-type]


@dataclass
class QuotedToy(HashServedModel):
    """A `QuotedModel` of hashes. `told` are its facts once it is loaded, which `ready` does."""

    told: ModelFacts = field(default_factory=facts_of)
    facts: ModelFacts | None = field(default_factory=facts_of)
    load: RequestLoad = field(default_factory=RequestLoad)
    load_s: float | None = 0.0
    refusal: str = ""
    held: int = 0
    adapter_digest: str = ""
    beside: PromptsAlike = field(default_factory=PromptsAlike)
    fails: KakeyaError | None = None
    """Raised by each call that can fail."""
    waits: RequestWait | None = None
    loads: list[tuple[float, GenerationPriority]] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    """Those that it was got for."""

    def waits_for(self) -> RequestWait | None:
        return self.waits

    def held_tokens(self, token_ids: Sequence[int], cuts: Sequence[int]) -> int:
        return min(self.held, len(token_ids))

    def alike(self, token_ids: Sequence[int]) -> PromptsAlike:
        return self.beside

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        self.loads.append((timeout_s, priority))
        if self.fails is not None:
            raise self.fails
        self.facts = replace(self.told, model_id=self.model_id)
        return self.facts

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        if self.fails is not None:
            raise self.fails
        async with aclosing(super().decode(request)) as frames:
            async for frame in frames:
                yield frame


@dataclass
class ToyEncoder(QuotedToy):
    """An `EmbeddingModel`: the vector of a text is its length."""

    asked: list[tuple[Sequence[Sequence[int]], int]] = field(default_factory=list)

    async def embed(
        self, texts: Sequence[Sequence[int]], *, size: int = 0, client: str = "", user: str = ""
    ) -> bytes:
        self.asked.append(([list(text) for text in texts], size))
        if self.fails is not None:
            raise self.fails
        return bytes(map(len, texts))


@dataclass
class ToyModels:
    """An `OwnModels`. MODEL:private is the same as MODEL, for its owner alone."""

    models: tuple[QuotedToy, ...] = ()
    encoders: tuple[ToyEncoder, ...] = ()

    def get(self, model_id: str, client: str = "") -> QuotedToy:
        name, _, adapter = model_id.partition(":")
        if any(one.model_id == name for one in self.encoders):
            raise InvalidArgument(f"{model_id} makes vectors")
        for model in self.models:
            if name in ("", model.model_id):
                if adapter and client != "owner":
                    raise Denied(f"{model_id} is of another client")
                model.clients.append(client)
                return model
        raise NotFound(f"no model {model_id!r} is served here")

    def verifiers(self) -> tuple[QuotedToy, ...]:
        return self.models

    async def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        names = [f"{model.model_id}:private" for model in self.models if client == "owner"]
        return tuple(AdaptedId(model_id=name, parent=name.partition(":")[0]) for name in names)

    def embedder(self, model_id: str) -> ToyEncoder:
        for model in self.encoders:
            if model.model_id == model_id:
                return model
        raise NotFound(f"no model {model_id!r} makes vectors here")

    def embedders(self) -> tuple[ToyEncoder, ...]:
        return self.encoders


class ToyPrecache(NoPrecache):
    """Names KV by its claim, as a node with prefixes does, and notes the turns that ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[PrefixClaim, TokenSource]] = []

    def kv_key(self, claim: PrefixClaim) -> str:
        keys = claim.use.keys
        return f"{claim.client}|{keys.conversation_id}" if keys.conversation_id else ""

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        self.ended.append((claim, tokens))


class ToyKeeper:
    """Keeps prefixes for others: those that it was sent with tokens, if its report is WARM."""

    def __init__(self) -> None:
        self.report = WarmReport(outcome=WarmOutcome.WARM, warmed=Warmed(tokens=3, computed=2))
        self.declared: set[bytes] = set()
        self.kept: dict[bytes, PeerPrefix] = {}
        self.came: list[PeerPrefix] = []

    def keeping(self, digest: bytes) -> Keeping:
        if digest in self.declared:
            return Keeping.DECLARED
        return Keeping.KEPT if digest in self.kept else Keeping.NOTHING

    async def keep(self, asked: PeerPrefix) -> WarmReport | None:
        self.came.append(asked)
        if not asked.tokens and self.keeping(asked.digest) is Keeping.NOTHING:
            return None
        if self.report.outcome is WarmOutcome.WARM and asked.digest not in self.declared:
            self.kept.setdefault(asked.digest, asked)
        return self.report


class ServingNode:
    """A node with a `ServingService` on a real server; `calls` are those of a peer to it."""

    def __init__(self, models: ToyModels, folder: Path) -> None:
        self.models = models
        self.router = ToyRouter()
        self.precache = ToyPrecache()
        self.clients = Clients(FakeClock().mono)
        texts = TextFiles(folder)
        self.for_peers = ToyKeeper()
        self.held = HeldAnswers(most_bytes=10**6, mono=FakeClock().mono)
        self.service = ServingService(
            models,
            self.router,
            texts,
            self.clients,
            self.precache,
            self.for_peers,  # type: ignore[arg-type]
            self.held,
            share=self.share,
        )
        self.asked: list[pb.DescribeShareRequest] = []
        self.shared = pb.DescribeShareResponse()
        self.server = grpc.aio.server()
        self.address = ""
        self._channel: grpc.aio.Channel | None = None

    async def share(self, request: pb.DescribeShareRequest) -> pb.DescribeShareResponse:
        if not request.probe_bytes:
            self.asked.append(request)
        return self.shared

    @property
    def channel(self) -> grpc.aio.Channel:
        assert self._channel is not None
        return self._channel

    @property
    def calls(self) -> PeerCalls:
        return PeerCalls(self.channel, "mini")

    @property
    def running(self) -> int:
        return sum(one["running"] + one["waiting"] for one in self.clients.status())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ServingNode]:
        add_ServingServiceServicer_to_server(self.service, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self._channel = grpc.aio.insecure_channel(self.address)
        try:
            yield self
        finally:
            await self._channel.close()
            await self.server.stop(None)
            await asyncio.sleep(0)
