"""The data directory: one holder, a state that survives or is set aside, never a crash."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.files import write_atomically
from kakeya.core.folders import default_folder
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import MAX_INCARNATION, is_valid_node_id
from kakeya.fleet.view.tombstones import RegistryState, Sighting
from kakeya.node.datadir import RUN, STATE, DataDir, RunInfo, find_running
from kakeya.node.state import DamagedState, NodeState, decode_state, encode_state, next_state
from tests.laws import law

PEERS = (Sighting(NodeId("mini-2"), "192.168.1.2:50051", 1.7e9),)
GOOD = NodeState(
    node_id="mini-abc234", memory=RegistryState(incarnation=7, stamp=1_700_000_000.25, peers=PEERS)
)
RUNNING = RunInfo(pid=os.getpid(), node_id="n", grpc="127.0.0.1:1", http="127.0.0.1:2")


def test_the_default_folder_follows_the_system(tmp_path: Path) -> None:
    home = Path("/home/a")
    assert default_folder({}, platform="darwin", home=home) == Path(
        "/home/a/Library/Application Support/kakeya"
    )
    assert default_folder({}, platform="linux", home=home) == Path("/home/a/.local/share/kakeya")
    xdg = {"XDG_DATA_HOME": "/data"}
    assert default_folder(xdg, platform="linux", home=home) == Path("/data/kakeya")
    own = {"KAKEYA_HOME": "/own", "XDG_DATA_HOME": "/data"}
    assert default_folder(own, platform="darwin", home=home) == Path("/own")


def test_the_folder_is_private(tmp_path: Path) -> None:
    with DataDir(tmp_path / "new" / "home"):
        mode = stat.S_IMODE((tmp_path / "new" / "home").stat().st_mode)
    assert mode == 0o700


def test_a_second_holder_is_refused_with_the_pid_and_the_remedy(tmp_path: Path) -> None:
    with DataDir(tmp_path), pytest.raises(Conflict) as refused:
        DataDir(tmp_path)
    assert str(os.getpid()) in refused.value.message
    assert "--data-dir" in refused.value.message
    DataDir(tmp_path).close()


def test_the_lock_of_a_killed_holder_falls(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from kakeya.node.datadir import DataDir\n"
        "held = DataDir(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Conflict, match=str(holder.pid)):
            DataDir(tmp_path)
        holder.kill()
    DataDir(tmp_path).close()


def test_a_file_in_the_place_of_the_folder_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--data-dir"):
        DataDir(tmp_path / "file")


def test_a_disk_without_room_for_the_pid_is_a_configuration_error_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match=r"No space left on device.*--data-dir"):
            DataDir(tmp_path)
    with DataDir(tmp_path):
        pass


def test_the_state_survives_a_restart(tmp_path: Path) -> None:
    with DataDir(tmp_path) as home:
        first = next_state(home.load_state(), node_id="", drawn_id="drawn", now=1000.0)
        home.save_state(first)
    with DataDir(tmp_path) as home:
        second = next_state(home.load_state(), node_id="", drawn_id="other", now=0.0)
    assert first == NodeState(node_id="drawn", memory=RegistryState(incarnation=999))
    assert second == first
    assert next_state(second, node_id="asked", drawn_id="x", now=0.0).node_id == "asked"


@given(
    st.builds(
        NodeState,
        node_id=st.text(min_size=1, max_size=60).filter(is_valid_node_id),
        memory=st.builds(
            RegistryState,
            incarnation=st.integers(0, MAX_INCARNATION - 2),
            stamp=st.floats(allow_nan=False, allow_infinity=False),
            peers=st.lists(
                st.builds(
                    Sighting,
                    st.text(min_size=1, max_size=20).filter(is_valid_node_id),
                    st.sampled_from(["10.0.0.1:1", "[fd00::1]:50051", "mini.local:9"]),
                    st.floats(0, 2e9),
                ),
                max_size=3,
            ).map(tuple),
        ),
    )
)
def test_a_state_round_trips(state: NodeState) -> None:
    assert decode_state(encode_state(state)) == state


def test_a_state_cut_at_any_byte_is_damaged() -> None:
    data = encode_state(GOOD)
    for length in range(len(data)):
        with pytest.raises(DamagedState):
            decode_state(data[:length])


@given(st.integers(0, len(encode_state(GOOD)) * 8 - 1))
@law(1000)
def test_a_state_with_a_flipped_bit_is_damaged_or_the_same(bit: int) -> None:
    data = bytearray(encode_state(GOOD))
    data[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(DamagedState):
        assert decode_state(bytes(data)) == GOOD


@given(st.binary(max_size=200))
@law(200)
def test_any_bytes_as_state_file_never_stop_a_start(junk: bytes) -> None:
    with tempfile.TemporaryDirectory() as name, DataDir(Path(name)) as home:
        (home.folder / STATE).write_bytes(junk)
        assert home.load_state() is None
        assert (home.folder / (STATE + ".corrupt")).read_bytes() == junk
        home.save_state(GOOD)
        assert home.load_state() == GOOD


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"version": 1}', '{"version": 2, "state": "{}"}', "[" * 100_000, "1e999"],
)
def test_foreign_json_is_damaged(content: str) -> None:
    with pytest.raises(DamagedState):
        decode_state(content.encode())


def test_a_state_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / STATE).mkdir()
    with DataDir(tmp_path) as home, pytest.raises(ConfigError) as refused:
        home.load_state()
    assert str(tmp_path / STATE) in refused.value.message
    assert "--data-dir" in refused.value.message


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A full disk, played by a file size limit in a child process (row 32)."""
    code = (
        "import resource, signal, sys, pathlib\n"
        "from kakeya.node.datadir import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = pathlib.Path(sys.argv[1]); write_atomically(path, b'old')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: write_atomically(path, bytes(10_000))\n"
        "except OSError: print('refused')\n"
    )
    path = tmp_path / "file"
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "refused\n"
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_run_file_is_believed_only_while_its_node_runs(tmp_path: Path) -> None:
    assert find_running(tmp_path) is None
    with DataDir(tmp_path) as home:
        assert find_running(tmp_path) is None
        home.write_run(RUNNING)
        assert find_running(tmp_path) == RUNNING
        content = (tmp_path / RUN).read_bytes()
    assert find_running(tmp_path) is None
    write_atomically(tmp_path / RUN, content)
    assert find_running(tmp_path) is None, "left by a killed node"


def test_a_damaged_run_file_is_no_node(tmp_path: Path) -> None:
    with DataDir(tmp_path):
        for junk in ("", "[]", "{", json.dumps({"pid": "x"})):
            (tmp_path / RUN).write_text(junk)
            assert find_running(tmp_path) is None
