"""Two real nodes with the embedded models: gossip, drafting across nodes, and what may die.

Everything runs over loopback with engine children, as it does for a person.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import mlx.core as mx
import mlx_lm
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya.cli.demo import texts
from kakeya.core.errors import InvalidArgument, KakeyaError, NotFound, PeerUnavailable
from kakeya.sessions.client import Client, ClientSession
from tests.node.nodes import (
    DRAFTER,
    PATIENT,
    VERIFIER,
    NodeProcess,
    drafter_node,
    model_state,
    offers,
    run_cli,
    seen_by,
    verifier_node,
)
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = texts()["code"][:200]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifier(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeProcess]:
    async with verifier_node(tmp_path_factory.mktemp("verifier")) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafter(
    verifier: NodeProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[NodeProcess]:
    async with drafter_node(tmp_path_factory.mktemp("drafter"), verifier) as node:
        yield node


async def generate(
    node: NodeProcess, policy: str, *, tokens: int = 32, temperature: float = 0.0, seed: int = 7
) -> list[int]:
    async with Client(node.grpc) as client, await client.create_session() as session:
        await session.append(PROMPT)
        stream = session.generate(tokens, draft_policy=policy, temperature=temperature, seed=seed)
        return [token async for token in stream]


async def open_stream(session: ClientSession, policy: str, tokens: int) -> tuple[list[int], object]:
    """Start a generation and take its first tokens."""
    await session.append(PROMPT)
    stream = session.generate(tokens, draft_policy=policy)
    first = [await anext(stream) for _ in range(8)]
    return first, stream


async def test_two_nodes_know_each_other_within_two_rounds(tmp_path: Path) -> None:
    """With 30 s between rounds, only the first round and one poke can have done it."""
    slow = ("--proposer", "ngram", "--exchange-interval", "30")
    async with NodeProcess(tmp_path / "a", "--node-id", "a", *slow) as first:
        flags = ("--node-id", "b", "--peer", first.grpc, *slow)
        async with NodeProcess(tmp_path / "b", *flags) as second:
            for node in (first, second):
                await eventually("both are seen", lambda n=node: set(seen_by(n)) == {"a", "b"})
            assert second.api.get("/api/v1/fleet")["gossip"]["rounds"] <= 2


async def test_a_card_offers_what_is_loaded(verifier: NodeProcess, drafter: NodeProcess) -> None:
    cards = seen_by(drafter)
    assert offers(cards["verifier"]) == {VERIFIER, "ngram"}
    assert offers(cards["drafter"]) == {DRAFTER, "ngram"}
    model = next(m for m in cards["verifier"]["models"] if m["model_id"] == VERIFIER)
    assert model["role"] == "verifier"
    assert cards["verifier"]["memory_bytes"] > 2**28


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
async def test_every_way_to_draft_gives_the_plain_tokens(
    verifier: NodeProcess, drafter: NodeProcess, temperature: float
) -> None:
    plain = await generate(verifier, "off", temperature=temperature)
    assert len(plain) == 32
    remote = (f"ngram@{drafter.grpc}", f"{DRAFTER}@{drafter.grpc}")
    for policy in ("auto", "ngram", "peer", *remote, "ngram@127.0.0.1:1", "nobody@127.0.0.1:1"):
        assert await generate(verifier, policy, temperature=temperature) == plain, policy
    if temperature:
        assert await generate(verifier, "off", temperature=temperature, seed=8) != plain


MODEL = Path(__file__).parents[2] / "kakeya" / "models" / VERIFIER
PROMPTS = ("Once upon a time", "import os\n\n\nclass Queue:", "def add(a, b):\n    return", "x")


async def test_answers_over_http_are_those_of_mlx_lm(verifier: NodeProcess) -> None:
    """Greedy ones, drafted or not, as mlx-lm's own model gives them in float32."""
    network, tokenizer = mlx_lm.load(str(MODEL))
    network.set_dtype(mx.float32)

    def expected(prompt: list[int]) -> str:
        """mlx-lm's own text of an answer begins without the space that the answer begins with."""
        stream = mlx_lm.stream_generate(network, tokenizer, prompt, max_tokens=16)
        tokens = [step.token for step in stream]
        before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
        return after.removeprefix(before).partition("<|")[0]

    for text in PROMPTS:
        turn = [{"role": "user", "content": text}]
        continued = expected(tokenizer.encode(text))
        answered = expected(tokenizer.apply_chat_template(turn, add_generation_prompt=True))
        for policy in ("auto", "off"):
            asked = {"model": VERIFIER, "max_tokens": 16, "temperature": 0, "draft_policy": policy}
            said = await post(verifier, "/v1/completions", {**asked, "prompt": text})
            assert said["choices"][0]["text"] == continued, policy
            said = await post(verifier, "/v1/chat/completions", {**asked, "messages": turn})
            assert said["choices"][0]["message"]["content"] == answered, policy


async def post(node: NodeProcess, path: str, body: dict[str, object]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://{node.http}", timeout=60) as client:
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


async def test_what_cannot_be_meant_has_the_right_status(verifier: NodeProcess) -> None:
    async with Client(verifier.grpc) as client:
        with pytest.raises(NotFound, match=VERIFIER):
            await client.create_session(model_id="nobody")
        async with await client.create_session() as session:
            with pytest.raises(InvalidArgument, match="vocabulary"):
                await session.append([65535])
            with pytest.raises(KakeyaError):
                await anext(session.generate(4))
            await session.append(PROMPT)
            with pytest.raises(InvalidArgument, match="MODEL_ID@HOST:PORT"):
                await anext(session.generate(4, draft_policy="nonsense"))
            assert len([token async for token in session.generate(4)]) == 4


async def test_a_node_that_only_drafts_has_others_decode(
    verifier: NodeProcess, drafter: NodeProcess
) -> None:
    assert await generate(drafter, "off") == await generate(verifier, "off")


@pytest.mark.slow
async def test_a_node_that_drafts_answers_its_clients_by_its_own_drafts_and_a_verifier_elsewhere(
    verifier: NodeProcess, drafter: NodeProcess
) -> None:
    asked = {"model": VERIFIER, "prompt": PROMPT, "max_tokens": 400, "temperature": 0}
    plain = await post(drafter, "/v1/completions", {**asked, "draft_policy": "off"})
    assert plain["usage"]["kakeya"]["sources"] == []
    compared = 0
    async with asyncio.timeout(150):
        while not compared:  # late drafts are not; in doubt, the drafter is not asked
            drafted = await post(drafter, "/v1/completions", {**asked, "draft_policy": "peer"})
            assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
            for source in drafted["usage"]["kakeya"]["sources"]:
                assert source["source"] == f"{DRAFTER}@{drafter.grpc}"
                compared += source["shadowed"] + source["verified"]


async def test_the_command_line_over_a_running_fleet(
    verifier: NodeProcess, drafter: NodeProcess
) -> None:
    node = ("--node", verifier.http)
    status = await asyncio.to_thread(run_cli, "status", *node)
    assert status.returncode == 0
    assert "verifier" in status.stdout
    assert "drafter" in status.stdout
    plan = await asyncio.to_thread(run_cli, "plan", *node)
    assert plan.returncode == 0
    assert f"draft   {DRAFTER} on drafter" in plan.stdout
    arguments = ("generate", *node, "--max-tokens", "12")
    plain = await asyncio.to_thread(run_cli, *arguments, "--prompt", "import os", "--draft", "off")
    drafted = await asyncio.to_thread(run_cli, *arguments, stdin="import os")
    assert plain.returncode == drafted.returncode == 0
    assert plain.stdout == drafted.stdout != ""
    assert "12 tokens" in plain.stderr
    refused = await asyncio.to_thread(run_cli, *arguments, "--prompt", "x", "--model", "nobody")
    assert refused.returncode == 1
    assert "nobody" in refused.stderr


async def test_status_is_watched_until_the_owner_has_seen_enough(verifier: NodeProcess) -> None:
    watch = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kakeya.cli.main", "status", "--watch", "--json"),
        *("--node", verifier.http),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert watch.stdout is not None
    seen = [json.loads(await asyncio.wait_for(watch.stdout.readline(), 20)) for _ in range(2)]
    watch.send_signal(signal.SIGINT)
    try:
        _, complaint = await asyncio.wait_for(watch.communicate(), 20)
    finally:
        if watch.returncode is None:
            watch.kill()
    assert [one["node"]["node_id"] for one in seen] == ["verifier"] * 2
    assert 0.5 <= seen[1]["node"]["uptime_s"] - seen[0]["node"]["uptime_s"] <= 5
    assert b"Traceback" not in complaint


async def test_every_floor_is_in_the_metrics(verifier: NodeProcess, drafter: NodeProcess) -> None:
    def scrape() -> str:
        with urllib.request.urlopen(f"http://{verifier.http}/metrics", timeout=10) as answer:
            return answer.read().decode()

    text = await asyncio.to_thread(scrape)
    for line in (
        "kakeya_fleet_nodes 2.0",
        'kakeya_model_ready{model="kakeya-tiny"} 1.0',
        'kakeya_task_running{task="gossip"} 1.0',
        'kakeya_task_failures_total{task="models"} 0.0',
    ):
        assert line in text.splitlines()
    assert "kakeya_generates_total" in text
    assert "kakeya_loop_stalls_total" in text


@pytest.mark.slow
async def test_a_killed_engine_costs_time_and_no_token(
    verifier: NodeProcess, drafter: NodeProcess
) -> None:
    """Row 34: the stream goes on in the next engine; peers see the model go and come back."""
    plain = await generate(verifier, "off", tokens=200)
    before = model_state(verifier, VERIFIER)
    async with Client(verifier.grpc) as client, await client.create_session() as session:
        first, stream = await open_stream(session, "off", 200)
        os.kill(before["pid"], signal.SIGKILL)
        assert [*first, *[token async for token in stream]] == plain
    # At once, unless the answer was whole before the engine was killed.
    await eventually(
        "the engine was started again",
        lambda: model_state(verifier, VERIFIER)["restarts"] == before["restarts"] + 1,
    )
    assert model_state(verifier, VERIFIER)["pid"] != before["pid"]

    def gone_or_back(killed: int) -> str:
        if VERIFIER not in offers(seen_by(drafter)["verifier"]):
            return "gone"
        model = model_state(verifier, VERIFIER)
        return "back" if model["state"] == "ready" and model["pid"] != killed else ""

    # A first restart is over sooner than a round of gossip; the next ones wait for 1, 2 and 4 s.
    for _ in range(3):
        killed = model_state(verifier, VERIFIER)["pid"]
        os.kill(killed, signal.SIGKILL)
        if await eventually("it is gone, or back", lambda pid=killed: gone_or_back(pid)) == "gone":
            break
    else:
        pytest.fail("the card never was without the model")
    await eventually("the model is back", lambda: VERIFIER in offers(seen_by(drafter)["verifier"]))


async def test_a_killed_proposer_costs_time_and_no_token(
    verifier: NodeProcess, tmp_path: Path
) -> None:
    """Row 29: drafts stop, the verifier goes on by itself."""
    plain = await generate(verifier, "off", tokens=100)
    async with NodeProcess(tmp_path, "--node-id", "mortal", "--proposer", "ngram") as mortal:
        async with Client(verifier.grpc) as client, await client.create_session() as session:
            first, stream = await open_stream(session, f"ngram@{mortal.grpc}", 100)
            mortal.send(signal.SIGKILL)
            assert await mortal.wait() == -signal.SIGKILL
            assert [*first, *[token async for token in stream]] == plain
    assert await generate(verifier, "peer", tokens=100) == plain


async def test_sigterm_lets_a_stream_end_and_tells_the_peers(
    verifier: NodeProcess, tmp_path: Path
) -> None:
    """Row 28: NOT_SERVING, a farewell, new calls refused, what runs ends, exit status 0."""
    flags = ("--peer", verifier.grpc)
    async with verifier_node(tmp_path, "--node-id", "leaver", *flags, program=PATIENT) as leaver:
        await eventually(
            "the model is offered",
            lambda: VERIFIER in offers(seen_by(verifier).get("leaver", {"models": []})),
        )
        plain = await generate(verifier, "off", tokens=120)
        async with (
            Client(leaver.grpc) as client,
            Client(leaver.grpc) as other,
            grpc.aio.insecure_channel(leaver.grpc) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            session = await client.create_session()
            first, stream = await open_stream(session, "off", 120)
            leaver.send(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(PeerUnavailable):
                await other.create_session()
            watch.cancel()
            assert [*first, *[token async for token in stream]] == plain
            assert await leaver.wait() == 0
    card = seen_by(verifier).get("leaver", {"models": [], "ttl_s": 10})
    assert (card["models"], card["ttl_s"]) == ([], 10)


async def test_a_second_signal_ends_it_at_once(verifier: NodeProcess, tmp_path: Path) -> None:
    async with verifier_node(tmp_path, "--node-id", "hasty", program=PATIENT) as hasty:
        engine = model_state(hasty, VERIFIER)["pid"]
        async with Client(hasty.grpc) as client:
            session = await client.create_session()
            _, stream = await open_stream(session, "off", 4000)
            hasty.send(signal.SIGTERM)
            await eventually("it is stopping", lambda: "stopping" in hasty.log_file.read_text())
            hasty.send(signal.SIGTERM)
            assert await hasty.wait() == 1
            with pytest.raises(PeerUnavailable):
                async for _token in stream:
                    pass
    assert "a second signal" in hasty.log_file.read_text()
    await eventually("the engine ended with it", lambda: not is_alive(engine))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_stream_of_the_page_tells_of_both_nodes(
    verifier: NodeProcess, drafter: NodeProcess
) -> None:
    """`httpx` reads it as a page does, and a node that is stopped meanwhile ends it."""
    known: dict[str, dict[str, Any]] = {}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", f"http://{verifier.http}/api/v1/events") as stream,
    ):
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                for node_id, told in json.loads(line.removeprefix("data: "))["nodes"].items():
                    known.setdefault(node_id, {}).update(told)
            if "memory" in known.get(drafter.node_id, {}):
                break
    own, peer = known[verifier.node_id], known[drafter.node_id]
    assert own["card"]["is_self"]
    assert not peer["card"]["is_self"]
    assert peer["node"]["node_id"] == drafter.node_id
    assert {"models", "requests", "recent", "events", "fleet"} <= own.keys()
    assert "fleet" not in peer
    assert any(one["what"] == "model ready" for one in own["events"])


async def test_the_owner_unloads_and_loads_a_model_over_http(verifier: NodeProcess) -> None:
    async with httpx.AsyncClient(base_url=f"http://{verifier.http}", timeout=60) as client:

        async def do(action: str, **body: object) -> int:
            return (await client.post(f"/api/v1/models/{action}", json=body)).status_code

        assert await do("unload", model=VERIFIER) == 200
        await eventually("it left", lambda: model_state(verifier, VERIFIER)["state"] == "unloaded")
        assert await do("load", model=VERIFIER) == 200
        assert model_state(verifier, VERIFIER)["state"] == "ready"
        assert await do("load", model="nobody") == 404
        assert await do("load") == 400
        assert await do("load", model=VERIFIER, at="once") == 400
        listed = (await client.get("/api/v1/models")).json()["data"]
        assert any(one["loaded_as"] == VERIFIER and not one["is_pulled"] for one in listed)
        assert await do("remove", model=VERIFIER) == 409
        assert await do("stop", model=VERIFIER) == 404
        assert await do("pull", model="../up") == 400
