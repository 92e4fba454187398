"""The owner's socket and the fleet's commands, as a person runs them."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from kakeya.backends.engine.process import MAX_SOCKET_PATH_BYTES
from kakeya.cli import fleet as fleet_cli
from kakeya.core.clock import SystemClock
from kakeya.core.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    Denied,
    InvalidArgument,
    KakeyaError,
    NotFound,
    PeerUnavailable,
)
from kakeya.core.host import host_label
from kakeya.dispatch.drain import DrainStep
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.cards.convert import from_wire
from kakeya.fleet.identity.identity import Identity, load_identity
from kakeya.fleet.identity.invite import decode_token
from kakeya.fleet.identity.membership import Membership, open_trust
from kakeya.memory.pressure_sources import read_level
from kakeya.node.control import ControlService, Fleet, NoFleet, control_socket
from kakeya.node.datadir import DataDir, RunInfo
from kakeya.v1 import distributed_pb2
from kakeya.v1.fleet_pb2_grpc import add_ControlServiceServicer_to_server
from kakeya.wire.channels import Channels
from kakeya.wire.server.listeners import Listeners


def kakeya(*words: str) -> int:
    """What `kakeya WORDS` does once its own parser hands over."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status")
    fleet_cli.add_parsers(commands)
    status = fleet_cli.run(parser.parse_args(words))
    assert status is not None
    return status


async def examine(peer: str) -> str:
    if peer == "nobody":
        raise NotFound("no node is called nobody")
    return json.dumps({"peer": peer})


def dispatch(word: str, free_bytes: int | None) -> str:
    return f"{read_level(word).name.lower()}, {free_bytes} free"


async def drain(
    patience_s: float, *, until_replaced: bool = False
) -> AsyncGenerator[DrainStep, None]:
    if patience_s == 1:
        raise Conflict("the node does not serve yet")
    yield DrainStep(requests=3, seconds=0.0)
    yield DrainStep(requests=1, seconds=patience_s)


@asynccontextmanager
async def controlled(home: Path, fleet: Fleet) -> AsyncIterator[None]:
    """A node's data directory is held, its socket answers."""

    def register(server: grpc.aio.Server) -> None:
        service = ControlService(fleet, examine=examine, dispatch=dispatch, drain=drain)
        add_ControlServiceServicer_to_server(service, server)

    data_dir = await asyncio.to_thread(DataDir, home)
    listeners = Listeners(register, clock=SystemClock())
    path = await asyncio.to_thread(control_socket, home)
    await listeners.open_plain(f"unix:{path}", flag="--data-dir")
    await listeners.start()
    run = RunInfo(pid=1, node_id="mini-1", grpc="127.0.0.1:1", http="127.0.0.1:2")
    await asyncio.to_thread(data_dir.write_run, run)
    try:
        yield
    finally:
        await listeners.stop(None)
        await asyncio.to_thread(data_dir.close)


@dataclass
class Running:
    home: Path
    identity: Identity
    membership: Membership


@asynccontextmanager
async def authority_node(home: Path) -> AsyncIterator[Running]:
    identity = await asyncio.to_thread(load_identity, home)
    assert identity is not None
    trust = await asyncio.to_thread(open_trust, home, identity)
    cards: list[Card] = []
    membership = Membership(
        home,
        trust,
        cards=lambda: cards,
        hosts=lambda: ["127.0.0.1"],
        channels=Channels(),
        clock=SystemClock(),
        rng=random.Random(1),
    )
    body = distributed_pb2.NodeCapability(
        node_id=identity.node_id, label=identity.label, is_authority=True
    )
    cards.append(from_wire(trust.seal(body.SerializeToString())))
    async with controlled(home, membership):
        yield Running(home, identity, membership)
    await membership.aclose()


async def run(*words: str) -> int:
    return await asyncio.to_thread(kakeya, *words)


@pytest.fixture
def founded(tmp_path: Path) -> Path:
    home = tmp_path / "one"
    assert kakeya("init", "--data-dir", str(home), "--label", "mini-1") == 0
    return home


def test_init_founds_a_fleet_and_says_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kakeya("init", "--data-dir", str(tmp_path), "--label", "mini-1") == 0
    identity = load_identity(tmp_path)
    assert identity is not None
    said = capsys.readouterr().out
    assert identity.fleet in said
    assert "kakeya invite" in said


def test_init_is_done_once(founded: Path) -> None:
    with pytest.raises(ConfigError, match="already"):
        kakeya("init", "--data-dir", str(founded))


def test_init_takes_the_hosts_name_and_speaks_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kakeya("init", "--data-dir", str(tmp_path), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    identity = load_identity(tmp_path)
    assert identity is not None
    assert said == {
        "fleet": identity.fleet,
        "node_id": identity.node_id,
        "label": host_label(),
    }


def test_identities_are_not_changed_under_a_running_node(tmp_path: Path) -> None:
    with DataDir(tmp_path):
        for words in (("init",), ("join", "kakeya-x")):
            with pytest.raises(Conflict, match="held by the node"):
                kakeya(*words, "--data-dir", str(tmp_path))


async def test_two_commands_bring_a_second_machine_in(
    founded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = tmp_path / "two"
    async with authority_node(founded) as node:
        assert await run("invite", "--data-dir", str(founded)) == 0
        said = capsys.readouterr()
        token = said.out.strip()
        assert "\n" not in token
        assert "15 minutes" in said.err
        assert decode_token(token).fleet == node.identity.fleet
        words = ("join", token, "--data-dir", str(two), "--label", "mini-2")
        assert await run(*words) == 0
        assert f"mini-2 joined fleet {node.identity.fleet} as member" in capsys.readouterr().out
        assert await run(*words) == 0
        assert "is a member already of fleet" in capsys.readouterr().out
        with pytest.raises(Denied, match="used already, by mini-2"):
            await run("join", token, "--data-dir", str(tmp_path / "three"))
    joined = await asyncio.to_thread(load_identity, two)
    assert joined is not None
    assert joined.fleet == node.identity.fleet


async def test_invites_are_for_a_role_and_speak_json(
    founded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with authority_node(founded):
        assert await run("invite", "--role", "client", "--json", "--data-dir", str(founded)) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["role"] == "client"
        words = ("join", made["token"], "--json", "--data-dir", str(tmp_path / "laptop"))
        assert await run(*words) == 0
        assert json.loads(capsys.readouterr().out)["role"] == "client"


async def test_revoke_names_a_node_and_the_list_grows(
    founded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "a" * 51 + "q"
    async with authority_node(founded) as node:
        assert await run("revoke", other, "--data-dir", str(founded)) == 0
        assert f"revoked {other[:8]};" in capsys.readouterr().out
        assert node.membership.trust.is_revoked(other)
        with pytest.raises(NotFound, match=r"no live node is called 'mini-9'; known are mini-1"):
            await run("revoke", "mini-9", "--data-dir", str(founded))
        with pytest.raises(Denied, match="does not revoke itself"):
            await run("revoke", "mini-1", "--data-dir", str(founded))


async def test_who_was_told_that_a_node_is_out_can_rely_on_it(founded: Path) -> None:
    """The answer comes once the list is on disk: a node killed right then has not forgotten."""
    lost, found = "a" * 51 + "q", "b" * 51 + "q"
    folder = founded / "identity"
    async with authority_node(founded) as node:
        assert await run("revoke", found, "--data-dir", str(founded)) == 0
        after_kill = await asyncio.to_thread(open_trust, founded, node.identity)
        assert after_kill.is_revoked(found)
        folder.rename(founded / "away")
        with pytest.raises(ConfigError, match=r"the list cannot be written to .*revocations\.bin"):
            await run("revoke", lost, "--data-dir", str(founded))
        assert node.membership.trust.is_revoked(lost)


async def test_a_node_in_no_fleet_says_how_to_found_or_join_one(tmp_path: Path) -> None:
    async with controlled(tmp_path, NoFleet()):
        for words in (("invite",), ("revoke", "mini-2")):
            with pytest.raises(ConfigError, match=r"in no fleet.*kakeya init.*kakeya join"):
                await run(*words, "--data-dir", str(tmp_path))


async def test_a_member_that_is_not_the_authority_says_so(founded: Path) -> None:
    (founded / "identity" / "ca-key.pem").unlink()
    async with authority_node(founded):
        with pytest.raises(Denied, match="not the authority"):
            await run("invite", "--data-dir", str(founded))


def test_without_a_running_node_there_is_nobody_to_tell(founded: Path) -> None:
    for words in (("invite",), ("revoke", "mini-2")):
        with pytest.raises(PeerUnavailable, match=r"no node runs in .* start kakeya-node"):
            kakeya(*words, "--data-dir", str(founded))


def test_a_node_whose_socket_does_not_answer_is_told_so(founded: Path) -> None:
    with DataDir(founded) as data_dir:
        data_dir.write_run(RunInfo(pid=1, node_id="x", grpc="127.0.0.1:1", http="127.0.0.1:2"))
        with pytest.raises(PeerUnavailable, match=r"does not answer on .*control\.sock"):
            kakeya("invite", "--data-dir", str(founded))


def test_a_node_that_hangs_is_told_so_and_by_its_pid(
    founded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped with SIGSTOP: its socket takes the call and nothing comes back."""
    monkeypatch.setattr(fleet_cli, "_TIMEOUT_S", 0.2)
    with DataDir(founded) as data_dir, socket.socket(socket.AF_UNIX) as hung:
        data_dir.write_run(RunInfo(pid=4711, node_id="x", grpc="127.0.0.1:1", http="127.0.0.1:2"))
        hung.bind(str(control_socket(founded)))
        hung.listen()
        with pytest.raises(DeadlineExceeded, match=r"\(pid 4711\) did not answer for 0.2 s"):
            kakeya("invite", "--data-dir", str(founded))


def test_a_token_that_is_none_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="paste the whole line"):
        kakeya("join", "hello", "--data-dir", str(tmp_path))


def test_other_commands_are_left_to_others() -> None:
    assert fleet_cli.run(argparse.Namespace(command="status")) is None


async def test_the_service_checks_what_it_is_asked(tmp_path: Path) -> None:
    from kakeya.v1 import fleet_pb2 as pb
    from kakeya.v1.fleet_pb2_grpc import ControlServiceStub
    from kakeya.wire.status import error_from_rpc

    async with controlled(tmp_path, NoFleet()):
        path = await asyncio.to_thread(control_socket, tmp_path)
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = ControlServiceStub(channel)
            for call, kind in (
                (stub.Invite(pb.InviteRequest(role="king"), timeout=5), InvalidArgument),
                (stub.Examine(pb.ExamineRequest(peer="nobody"), timeout=5), NotFound),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await call
                error: KakeyaError = error_from_rpc(failure.value, "node")
                assert isinstance(error, kind)
            report = await stub.Examine(pb.ExamineRequest(peer="mini-2"), timeout=5)
            assert json.loads(report.report) == {"peer": "mini-2"}


async def test_a_folder_too_deep_for_a_socket_still_has_one(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    assert len(str(deep)) > MAX_SOCKET_PATH_BYTES
    path = await asyncio.to_thread(control_socket, deep)
    assert len(str(path)) <= MAX_SOCKET_PATH_BYTES
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path == await asyncio.to_thread(control_socket, deep)
    async with controlled(deep, NoFleet()):
        with pytest.raises(ConfigError, match="in no fleet"):
            await run("invite", "--data-dir", str(deep))
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        await asyncio.to_thread(control_socket, deep)
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)
    path.parent.rmdir()


async def test_drain_tells_what_runs_and_what_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with controlled(tmp_path, NoFleet()):
        where = ("--data-dir", str(tmp_path))
        assert await run("drain", *where, "--patience", "7", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"cut_off": 1, "seconds": 7.0}
        assert await run("drain", *where, "--patience", "7") == 0
        told = capsys.readouterr()
        assert told.err.splitlines() == ["3 requests run, 0 s", "1 requests run, 7 s"]
        assert "1 requests were cut off" in told.out
        with pytest.raises(InvalidArgument, match="--patience is 0; above 0"):
            await run("drain", *where, "--patience", "0")
        with pytest.raises(Conflict, match="does not serve yet"):
            await run("drain", *where, "--patience", "1")
