"""Adapters on real nodes with real engines and trained adapters: same words, whatever happens."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from kakeya.backends.adapted import AdaptedModel
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import engine_command
from kakeya.config import config
from kakeya.core.clock import SystemClock
from kakeya.core.errors import Denied, NotFound
from kakeya.core.tasks import Supervisor
from kakeya.generation.facts import ModelState
from kakeya.generation.frames import Done, Tokens
from kakeya.generation.request import DecodeRequest
from kakeya.node.adapters import NodeAdapters
from kakeya.node.memory import EngineSetup, NodeMemory
from kakeya.node.pages import NodePages
from kakeya.sessions.client import Client
from tests.adapters.adapter_folders import tiny_adapter
from tests.node.nodes import VERIFIER, NodeProcess, model_state, run_cli, verifier_node
from tests.node.test_memory import TEXT_MODEL
from tests.scrapes import ALERTS, DASHBOARD
from tests.waiting import eventually

TRAINED = Path(__file__).parents[1] / "adapters" / "trained"
NAMES = ("letter", "march", "query", "recipe", "record", "setting", "shout", "table")
PROMPT, RECIPE, TALE = "ERROR [4", "Take two", "Once upon a time"
TOKENS = 40
SERIES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
"""How the series of a family are named, by its kind."""
shared = pytest.mark.asyncio(loop_scope="module")
"""Of tests that use the one node of `home`, each with adapters of its own."""


async def cli(node_folder: Path, *words: str, fails: bool = False) -> str:
    done = await asyncio.to_thread(
        run_cli, "adapters", *words, "--data-dir", str(node_folder / "data")
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


async def add(node_folder: Path, name: str, *more: str) -> None:
    path = str(TRAINED / name)
    await cli(node_folder, "add", name, "--base", VERIFIER, "--path", path, *more)


def client_of(node: NodeProcess, name: str = "") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{node.http}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        default_headers={"x-kakeya-client": name} if name else {},
    )


async def text(
    client: openai.AsyncOpenAI, name: str, tokens: int = TOKENS, prompt: str = PROMPT
) -> str:
    answer = await client.completions.create(
        model=f"{VERIFIER}:{name}" if name else VERIFIER,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
    )
    return answer.choices[0].text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Path, NodeProcess]]:
    """The folder of a node, and the node; its pages are larger than they are unless told."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "node.toml").write_text("[pages]\npage_kb = 2048\n")
    async with verifier_node(folder, "--config", str(folder / "node.toml")) as node:
        yield folder, node


@pytest.mark.slow
async def test_eight_adapters_at_once_say_what_each_says_alone(tmp_path: Path) -> None:
    """Two of each and the base at the same time, through the real client of OpenAI."""
    async with verifier_node(tmp_path) as node:
        for name in NAMES:
            await add(tmp_path, name)
        async with client_of(node) as client:
            alone = {name: await text(client, name) for name in ("", *NAMES)}
            assert len(set(alone.values())) == 9, alone
            asked = [*NAMES, "", *reversed(NAMES), ""]
            together = await asyncio.gather(*(text(client, name) for name in asked))
            assert together == [alone[name] for name in asked]
            listed = [m async for m in client.models.list()]
            parents = {m.id: getattr(m, "parent", None) for m in listed}
        assert parents == {VERIFIER: None} | {f"{VERIFIER}:{name}": VERIFIER for name in NAMES}
        status = node.api.get("/api/v1/status")
        assert len(status["adapters"]["models"][VERIFIER]["hot"]) == 8
        pages, prompts = status["adapters"]["pages"], status["prefixes"]["pages"]
        assert prompts["blocks"] == 9, "of the base and of each adapter"
        prompt_pages = prompts["bytes"] // pages["page_bytes"]
        assert pages["evictable"] == 8 + prompt_pages, "an adapter each, none read now"
        engine = status["memory"]["engines"][VERIFIER]
        assert 0 < engine["slot_bytes"] == engine["lent_slot_bytes"] < engine["lease_bytes"]


@pytest.mark.slow
async def test_an_exact_adapter_says_what_mlx_lm_says_with_it(tmp_path: Path) -> None:
    """mlx-lm loads the folder itself, and its plain forward picks the same tokens."""
    script = f"""
import sys, json
from kakeya.mlx.numerics.blas import preload_blas
preload_blas(threads=1)
import mlx.core as mx
from mlx_lm.utils import load
from mlx.utils import tree_map
from kakeya.generation.spec import EMBEDDED_FOLDER
model, tokenizer = load(str(EMBEDDED_FOLDER / "{VERIFIER}"), adapter_path=sys.argv[1])
model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
model.eval()
ids = tokenizer.encode(sys.argv[2], add_special_tokens=False)
said = []
while len(said) < {TOKENS}:
    token = int(mx.argmax(model(mx.array([ids + said]))[0, -1]).item())
    if token in (0, 2):
        break
    said.append(token)
print(json.dumps(tokenizer.decode(said)))
"""
    prompts = {"shout": "ERROR [4", "recipe": RECIPE}
    async with verifier_node(tmp_path) as node:
        async with client_of(node) as client:
            for name, prompt in prompts.items():
                await add(tmp_path, name, "--exact")
                theirs = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-c", script, str(TRAINED / name), prompt],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                ours = await text(client, name, prompt=prompt)
                assert len(ours) > 20
                assert ours == json.loads(theirs.stdout)


@shared
@pytest.mark.slow
async def test_a_killed_engine_costs_an_adapters_stream_no_word(
    home: tuple[Path, NodeProcess],
) -> None:
    folder, node = home
    before = model_state(node, VERIFIER)["restarts"]
    made = await asyncio.to_thread(tiny_adapter, folder / "made", 1, size=0.05)
    await cli(folder, "add", "made", "--base", VERIFIER, "--path", str(made))
    async with client_of(node) as client:
        whole = await text(client, "made", 400, TALE)
        killed: list[int] = []
        said: list[str] = []
        stream = await client.completions.create(
            model=f"{VERIFIER}:made",
            prompt=TALE,
            max_tokens=400,
            temperature=0,
            stream=True,
        )
        async for event in stream:
            said.append(event.choices[0].text)
            if "".join(said) and not killed:
                killed.append(model_state(node, VERIFIER)["pid"])
                os.kill(killed[0], signal.SIGKILL)
        assert "".join(said) == whole
        await eventually(
            "it was started again",
            lambda: model_state(node, VERIFIER)["restarts"] == before + 1,
        )


@pytest.mark.slow
async def test_a_killed_node_comes_back_with_its_adapters_and_removes_its_slabs(
    tmp_path: Path,
) -> None:
    async with verifier_node(tmp_path) as node:
        await add(tmp_path, "shout", "--owner", "alice")
        async with client_of(node, "alice") as client:
            before = await text(client, "shout")
        node.send(signal.SIGKILL)
        await node.wait()
    async with verifier_node(tmp_path) as node:
        assert "removed what a killed node left slabs=1" in node.log_file.read_text()
        async with client_of(node, "alice") as client:
            assert await text(client, "shout") == before
        found = json.loads(await cli(tmp_path, "list", "--json"))
        assert [(a["model_id"], a["owner"], a["tier"]) for a in found] == [
            (f"{VERIFIER}:shout", "alice", "hot")
        ]


@shared
async def test_owners_are_told_apart_and_unknown_names_get_near_ones(
    home: tuple[Path, NodeProcess],
) -> None:
    folder, node = home
    await add(folder, "shout", "--owner", "alice")
    await add(folder, "table")
    async with client_of(node, "bob") as bob, client_of(node, "alice") as alice:
        with pytest.raises(openai.PermissionDeniedError, match="belongs to another client"):
            await text(bob, "shout")
        assert await text(alice, "shout")
        assert f"{VERIFIER}:shout" not in {m.id async for m in bob.models.list()}
        assert f"{VERIFIER}:shout" in {m.id async for m in alice.models.list()}
        assert (await bob.models.retrieve(f"{VERIFIER}:table")).parent == VERIFIER
        with pytest.raises(openai.NotFoundError, match=f"did you mean {VERIFIER}:table"):
            await text(bob, "tabel")
        with pytest.raises(openai.NotFoundError, match=f"served: {VERIFIER}"):
            await bob.completions.create(model="other:table", prompt="a")

    def pages() -> dict[str, int]:
        found: dict[str, int] = node.api.get("/api/v1/status")["adapters"]["pages"]
        return found

    assert pages()["page_bytes"] == 2 << 20
    await eventually("an adapter each can go", lambda: pages()["evictable"] >= 2)
    async with Client(node.grpc) as client:
        with pytest.raises(Denied, match="belongs to another client"):
            await client.create_session(model_id=f"{VERIFIER}:shout")
        with pytest.raises(NotFound, match="did you mean"):
            await client.create_session(model_id=f"{VERIFIER}:tabel")
    async with Client(node.grpc, client_name="alice") as client:
        async with await client.create_session(model_id=f"{VERIFIER}:shout") as session:
            await session.append([40, 50, 60])
            shouted = [token async for token in session.generate(12)]
        async with await client.create_session(model_id=VERIFIER) as session:
            await session.append([40, 50, 60])
            assert [token async for token in session.generate(12)] != shouted
    assert "not a whole path" not in await cli(folder, "remove", "shout")
    assert "there is no adapter" in await cli(folder, "remove", "shout", fails=True)
    refused = await cli(
        folder, "add", "x", "--base", "nobody", "--path", str(TRAINED / "march"), fails=True
    )
    assert "decodes with no model 'nobody' that takes adapters" in refused


@shared
async def test_a_session_keeps_its_adapter_over_turns_and_hears_when_it_was_removed(
    home: tuple[Path, NodeProcess],
) -> None:
    folder, node = home
    await add(folder, "march")
    async with Client(node.grpc) as client:
        async with await client.create_session(model_id=f"{VERIFIER}:march") as session:
            await session.append([40, 50, 60])
            first = [token async for token in session.generate(6)]
            second = [token async for token in session.generate(6)]
            await cli(folder, "remove", "march")
            with pytest.raises(NotFound, match="no adapter"):
                _ = [token async for token in session.generate(6)]
        async with await client.create_session(model_id=VERIFIER) as session:
            await session.append([40, 50, 60])
            assert [token async for token in session.generate(12)] != [*first, *second]


@shared
async def test_dashboard_and_rules_ask_for_what_a_running_node_exports(
    home: tuple[Path, NodeProcess],
) -> None:
    """Under the name that it has there. Which labels there are is held against each part's own
    metrics elsewhere: a counter that was never counted up has none yet."""
    _, node = home
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{node.http}/metrics")).text
    names = set()
    for family in text_string_to_metric_families(text):
        names |= {f"{family.name}{end}" for end in SERIES.get(family.type, ("",))}
        assert len(family.documentation) > 10, family.name
    for told in (DASHBOARD, ALERTS):
        asked = set(re.findall(r"kakeya_\w+", json.dumps(told)))
        assert len(asked) > 20
        assert asked <= names, sorted(asked - names)


@shared
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_prometheus_finds_no_fault_in_the_metrics(home: tuple[Path, NodeProcess]) -> None:
    """Names with their units, help texts, no label twice."""
    _, node = home
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{node.http}/metrics")).text
    check = (str(shutil.which("promtool")), "check", "metrics")
    ran = await asyncio.to_thread(
        subprocess.run, check, input=text, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[tuple[NodeMemory, NodeAdapters]]:
    clock = SystemClock()
    settings = await asyncio.to_thread(config.load, ("--data-dir", str(folder)), {})

    def build() -> NodeMemory:
        return NodeMemory(
            settings.memory,
            [TEXT_MODEL],
            EngineSetup(
                command=engine_command("text", adapters=settings.adapters),
                options=EngineOptions(),
                sockets=None,
            ),
            data_dir=folder,
            clock=clock,
            rng=random.Random(1),
            on_change=lambda: None,
        )

    async with await asyncio.to_thread(build) as memory:
        pages = NodePages(
            settings.adapters,
            settings.precache,
            memory,
            data_dir=folder,
            clock=clock,
            rng=random.Random(str(folder)),
        )
        async with pages, Supervisor(clock) as tasks:
            await memory.start(tasks, "node")
            yield memory, pages.adapters


async def test_pins_of_a_killed_engine_are_back_before_it_is_started_again(tmp_path: Path) -> None:
    """Conserved: what the dead one held is free, what others hold is held, nothing is lost."""
    async with in_process(tmp_path) as (memory, adapters):
        manager, arena = adapters.manager, adapters.arena
        model = memory.engines.get(VERIFIER)
        for name in NAMES[:3]:
            await manager.register(name, VERIFIER, TRAINED / name)
        for name in NAMES[:3]:
            (await manager.acquire(f"{VERIFIER}:{name}")).release()
        pid = model.pid
        assert pid is not None
        blocks = list(arena._arena.pool.blocks())
        assert len(blocks) == 3
        other = arena.holder("a session")
        arena.hold(blocks[0], other).pin()
        for block in blocks[1:]:
            arena.hold(block, arena.engine(VERIFIER, pid)).pin()
        tenant = next(iter(arena._told))
        half = await arena.prepare(tenant, 1000, arena.engine(VERIFIER, pid))
        assert arena.snapshot().pool.pinned_pages == 4
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while model.pid == pid:
                await asyncio.sleep(0.001)
        pool = arena.snapshot().pool
        assert pool.pinned_pages == 1
        assert not half.block.is_live
        assert pool.free_pages == pool.total_pages - 3
        assert blocks[0].is_pinned
        async with asyncio.timeout(60):
            with await manager.acquire(f"{VERIFIER}:{NAMES[0]}") as lease:
                assert lease.adapter_id in await model.backend.adapters()
        assert model.state is ModelState.READY


@pytest.mark.slow
async def test_an_evicted_model_comes_back_for_its_adapter(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (memory, adapters):
        model = memory.engines.get(VERIFIER)
        await adapters.manager.register("shout", VERIFIER, TRAINED / "shout")
        model_id = f"{VERIFIER}:shout"
        adapted = AdaptedModel(model, model_id, "", adapters.manager)
        request = DecodeRequest(token_ids=[40, 50, 60], max_tokens=8)

        async def said() -> list[int]:
            frames = [frame async for frame in adapted.decode(request)]
            assert isinstance(frames[-1], Done)
            return [i for f in frames if isinstance(f, Tokens) for i in f.token_ids]

        before = await said()
        memory.arbiter.unload(model.capability, VERIFIER)
        async with asyncio.timeout(60):
            while model.state is not ModelState.UNLOADED:
                await asyncio.sleep(0.01)
        assert adapters.manager.status()["models"][VERIFIER]["hot"] == []
        assert await said() == before
