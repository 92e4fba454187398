"""A deterministic model and a real tokenizer, small enough for every test."""

from __future__ import annotations

import asyncio
import functools
import random
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from kakeya.backends.relay.relays import Relays
from kakeya.core.clock import SystemClock
from kakeya.core.errors import InvalidArgument, NotFound, PeerUnavailable
from kakeya.core.tasks import Supervisor
from kakeya.dispatch.capabilities import Capabilities
from kakeya.dispatch.jobs import JobQueue
from kakeya.dispatch.peers.ring_survey import RingSurvey
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.routed.copied import AnswerCopies
from kakeya.gateway.app import build_app
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.server import serve_http
from kakeya.generation.facts import DraftModelState, EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import (
    Done,
    Frame,
    Progress,
    SourceUsage,
    StopReason,
    TokenLogprob,
    Tokens,
    Usage,
)
from kakeya.generation.image import ImageModel
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import DecodeRequest, DraftSource, GenerationPriority
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.prefix.seam import NoPrecache, Precache

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse' %}{{ raise_exception('as you say') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["hello world, this is a little text about the world of text. 日本語 😀"] * 4


@functools.cache
def tokenizer_json() -> str:
    """Trained once."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def make_folder(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    return folder


@dataclass
class Pace:
    """How long the toy takes, and how many tokens a step commits."""

    prefill_s: float = 0.0
    step_s: float = 0.0
    per_step: int = 1


@dataclass
class ToyModel:
    """Says `script` and then the stop token, or, without a script, noise keyed by (seed, position).

    `open` counts running decodes; `closed` is set whenever one is closed; `fail_after` raises
    PeerUnavailable behind so many tokens. `gate`, when given, is waited for before the first token.
    The logprob of each token is -0.5, and the likeliest ones in its place are itself.
    """

    folder: Path
    model_id: str = "toy"
    script: str | None = None
    pace: Pace = field(default_factory=Pace)
    state: ModelState = ModelState.READY
    last_error: str = ""
    manifest: Manifest = NO_MANIFEST
    loads: str = ""
    context_tokens: int = 512
    fail_after: int | None = None
    commits_stop_token: bool = True
    gate: asyncio.Event | None = None

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.loaded = asyncio.Event()
        if self.state is ModelState.READY:
            self.loaded.set()
        self.closed = asyncio.Event()
        self.started = asyncio.Event()
        self.open = 0
        self.requests: list[DecodeRequest] = []

    def waits_for(self) -> RequestWait | None:
        if not self.loads:
            return None
        return RequestWait(reason=WaitReason.LOAD, model_id=self.model_id, progress=self.loads)

    @property
    def facts(self) -> ModelFacts | None:
        return self._facts() if self.loaded.is_set() else None

    def _facts(self) -> ModelFacts:
        return ModelFacts(
            model_id=self.model_id,
            model_path=str(self.folder),
            vocab_size=self.tokenizer.get_vocab_size(),
            context_tokens=self.context_tokens,
            eos_token_ids=(2,),
        )

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        if self.state is ModelState.FAILED:
            raise PeerUnavailable(f"{self.model_id}: {self.last_error}", retry_after_s=7)
        try:
            await asyncio.wait_for(self.loaded.wait(), timeout_s)
        except TimeoutError:
            raise PeerUnavailable(f"{self.model_id} still loads", retry_after_s=3) from None
        return self._facts()

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        self.requests.append(request)
        self.open += 1
        self.started.set()
        self.closed.clear()
        try:
            await asyncio.sleep(self.pace.prefill_s)
            total = len(request.token_ids)
            yield Progress(
                computed_tokens=total,
                total_tokens=total,
                cached_tokens=_usage(total, 0).cached_tokens,
            )
            if self.gate is not None:
                await self.gate.wait()
            said = 0
            reason = StopReason.MAX_TOKENS
            for step in self._steps(request):
                await asyncio.sleep(self.pace.step_s)
                said += len(step)
                if self.fail_after is not None and said > self.fail_after:
                    raise PeerUnavailable(f"{self.model_id}: the engine is gone")
                if step[-1] in request.stop_token_ids:
                    reason = StopReason.STOP_TOKEN
                    step = step if self.commits_stop_token else step[:-1]
                if step:
                    top = request.top_logprobs
                    told = () if top is None else step
                    yield Tokens(
                        token_ids=step,
                        logprobs=tuple(
                            TokenLogprob(logprob=-0.5, top=((one, -0.5),) * top) for one in told
                        ),
                    )
                if reason is StopReason.STOP_TOKEN:
                    break
            yield Done(reason=reason, usage=_usage(total, said))
        finally:
            self.open -= 1
            self.closed.set()

    def _steps(self, request: DecodeRequest) -> list[tuple[int, ...]]:
        said = len(request.token_ids) - (request.prompt_tokens or len(request.token_ids))
        most = said + request.max_tokens
        if self.script is None:
            noise = random.Random(request.sampling.seed)
            ids = [noise.randrange(3, 250) for _ in range(most)]
        else:
            ids = [*self.tokenizer.encode(self.script).ids, 2][:most]
        ids = ids[said:]
        size = self.pace.per_step
        return [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]

    async def release(self, kv_key: str) -> None:
        return None

    async def stats(self) -> EngineStats:
        return EngineStats()


def _usage(prompt_tokens: int, said: int) -> Usage:
    return Usage(
        prefill_s=0.001,
        total_s=0.002,
        cached_tokens=prompt_tokens // 2,
        forwards=said,
        drafted=4,
        verified=3,
        accepted=2,
        sources=(SourceUsage(source="ngram", drafts=1, drafted=4, verified=3, accepted=2),),
    )


@dataclass
class ToyEmbedder:
    """The vector of a text is its first id, its last id, and its length, cut off at `size`."""

    folder: Path
    model_id: str = "encoder"
    state: ModelState = ModelState.READY
    last_error: str = ""
    manifest: Manifest = NO_MANIFEST
    nested_sizes: tuple[int, ...] = ()
    context_tokens: int = 16
    lasts: float = 0.0

    def __post_init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.facts = ModelFacts(
            model_id=self.model_id,
            model_path=str(self.folder),
            vocab_size=tokenizer.get_vocab_size(),
            context_tokens=self.context_tokens,
            eos_token_ids=(),
            vector_size=3,
            nested_sizes=self.nested_sizes,
        )
        self.asked: list[list[list[int]]] = []
        self.priorities: list[GenerationPriority] = []
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()

    def waits_for(self) -> RequestWait | None:
        return None

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        self.priorities.append(priority)
        return self.facts

    async def embed(
        self, texts: Sequence[Sequence[int]], *, size: int = 0, client: str = "", user: str = ""
    ) -> bytes:
        self.asked.append([list(text) for text in texts])
        self.started.set()
        try:
            await asyncio.sleep(self.lasts)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        vectors = [[text[0], text[-1], len(text)][: size or 3] for text in texts]
        return b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)


class Directory:
    def __init__(
        self,
        *models: ToyModel,
        embedders: Sequence[ToyEmbedder] = (),
        images: Sequence[ImageModel] = (),
    ) -> None:
        self.models = models
        self._embedders = tuple(embedders)
        self._images = tuple(images)

    def image_model(self, model_id: str) -> ImageModel:
        for model in self._images:
            if model_id in ("", model.model_id):
                return model
        raise NotFound(f"no image model {model_id}")

    def image_models(self) -> tuple[ImageModel, ...]:
        return self._images

    def embedder(self, model_id: str) -> ToyEmbedder:
        for model in self._embedders:
            if model_id == model.model_id:
                return model
        raise NotFound(f"no embedder {model_id}")

    def embedders(self) -> tuple[ToyEmbedder, ...]:
        return self._embedders

    def get(self, model_id: str, client: str = "") -> ToyModel:
        for model in self.models:
            if model_id in ("", model.model_id):
                return model
        raise NotFound(f"no model {model_id}")

    def verifiers(self) -> tuple[ToyModel, ...]:
        return self.models

    async def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        return ()


class Router:
    def sources(self, facts: ModelFacts, policy: str) -> tuple[DraftSource, ...]:
        if policy not in ("", "auto", "off", "ngram", "peer"):
            raise InvalidArgument(f"no draft policy {policy!r}", param="draft_policy")
        return (DraftSource(kind="ngram"),) if policy != "off" else ()


def no_jobs() -> JobQueue:
    """Jobs that no file keeps."""
    return JobQueue(None, clock=SystemClock(), rng=random.Random(2))


@dataclass
class Served:
    """A gateway on a real socket, with real clients."""

    port: int
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    async def raw(self, request: bytes, *, wait_s: float = 60.0) -> bytes:
        """Send bytes as they are; returns what came until the server closed or fell silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = b""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    piece = await reader.read(65536)
                    answer += piece
                    if not piece or _is_whole(answer):
                        return answer
        except TimeoutError:
            return answer
        finally:
            writer.transport.abort()


def _is_whole(answer: bytes) -> bool:
    head, gap, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return bool(gap) and len(body) >= int(line.split(b":")[1])
    return False


@asynccontextmanager
async def serving(
    *models: ToyModel,
    limits: HttpLimits = HttpLimits(),  # noqa: B008
    status: Callable[[], Mapping[str, object]] = dict,
    hosts: frozenset[str] = frozenset(),
    origins: frozenset[str] = frozenset(),
    keys: KeyCheck | None = None,
    head_s: float = 5.0,
    proposers: Callable[[], Sequence[DraftModelState]] = tuple,
    unready: Callable[[], str] = str,
    precache: Precache = NoPrecache(),  # noqa: B008
    embedders: Sequence[ToyEmbedder] = (),
    images: Sequence[ImageModel] = (),
    store_bytes: int = 0,
    copies: AnswerCopies | None = None,
    tasks: TaskRegistry | None = None,
    relays: Relays | None = None,
    jobs: JobQueue | None = None,
    capabilities: Capabilities | None = None,
    ring: RingSurvey | None = None,
    seed: int = 1,
) -> AsyncIterator[Served]:
    jobs = jobs or no_jobs()
    app = build_app(
        Directory(*models, embedders=embedders, images=images),
        Router(),
        status=status,
        clock=SystemClock(),
        rng=random.Random(seed),
        limits=limits,
        hosts=hosts,
        origins=origins,
        keys=keys,
        proposers=proposers,
        unready=unready,
        precache=precache,
        store_bytes=store_bytes,
        copies=copies,
        tasks=tasks,
        relays=relays,
        jobs=jobs,
        capabilities=capabilities,
        ring=ring,
    )
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    async with serve_http(app, sock, head_s=head_s), Supervisor(SystemClock()) as works:
        jobs.start(works)
        async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as http:
            transport = httpx.AsyncClient(trust_env=False)
            client = AsyncOpenAI(
                base_url=base + "/v1", api_key="none", max_retries=0, http_client=transport
            )
            async with client:
                yield Served(port=port, http=http, openai=client)


class CountingTokenizer:
    """A tokenizer that says which texts it encoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        self.texts += texts
        return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens))
