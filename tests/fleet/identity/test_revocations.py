"""The list on disk (S4.32, S4.33), its versions and limits."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.fleet.identity.authority import new_fleet
from kakeya.fleet.identity.certificates import Untrusted, authority_key, read_authority, read_key
from kakeya.fleet.identity.revocations import (
    NONE,
    BadList,
    Revocations,
    load_revocations,
    read_list,
    save_revocations,
    sign_list,
)
from kakeya.v1 import fleet_pb2 as pb

NOW = 1_700_000_000.0
FIRST = new_fleet("mini-1", NOW)
CA_KEY = read_key(FIRST.ca_key or b"")
PUBLIC = authority_key(read_authority(FIRST.tls.authority))
IDS = ("a" * 51 + "q", "b" * 51 + "q")


def made(*ids: str, after: Revocations = NONE, now: float = NOW) -> Revocations:
    return sign_list(ids, after=after, key=CA_KEY, now=now)


def test_a_list_is_read_as_it_was_made() -> None:
    first = made(*IDS)
    assert read_list(first.blob, PUBLIC) == first
    assert first.node_ids == frozenset(IDS)


def test_versions_grow_with_the_clock_and_against_it() -> None:
    first = made(IDS[0])
    assert first.version == int(NOW)
    second = made(*IDS, after=first, now=NOW - 3600)
    assert second.version == first.version + 1


def test_what_is_no_id_of_a_key_is_not_revoked() -> None:
    for wrong in ("", "mini-1", "A" * 52, "a" * 51 + "b", "1" * 52):
        with pytest.raises(Untrusted):
            made(wrong)


def test_a_list_says_what_it_says_in_one_way() -> None:
    signed = pb.SignedRevocations.FromString(made(IDS[0]).blob)
    respelled = signed.SerializeToString() + b"\x1a\x03pad"
    assert read_list(respelled, PUBLIC).blob == signed.SerializeToString()


def test_a_signed_list_without_sense_is_refused() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    for content in (
        pb.RevocationList(version=0),
        pb.RevocationList(version=2**63),
        pb.RevocationList(version=1, made_at_unix=float("nan")),
        pb.RevocationList(version=1, key_hashes=[b"short"]),
    ):
        data = content.SerializeToString()
        signature = CA_KEY.sign(b"kakeya-revocations" + data, ec.ECDSA(hashes.SHA256()))
        blob = pb.SignedRevocations(list=data, signature=signature).SerializeToString()
        with pytest.raises(BadList):
            read_list(blob, PUBLIC)


def test_a_damaged_file_is_set_aside_and_never_names_another_node(tmp_path: Path) -> None:
    path = tmp_path / "revocations.bin"
    whole = made(*IDS)
    rng = random.Random(3)
    cuts = [whole.blob[:length] for length in range(len(whole.blob))]
    flips = []
    for _ in range(1000):
        damaged = bytearray(whole.blob)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        flips.append(bytes(damaged))
    for content in (*cuts, *flips):
        path.write_bytes(content)
        assert load_revocations(path, PUBLIC) == NONE
        assert not path.exists()
        assert path.with_name("revocations.bin.corrupt").read_bytes() == content
    save_revocations(path, whole)
    assert load_revocations(path, PUBLIC) == whole


def test_a_node_without_a_list_has_none(tmp_path: Path) -> None:
    assert load_revocations(tmp_path / "revocations.bin", PUBLIC) == NONE


def test_a_full_disk_leaves_the_old_list(tmp_path: Path) -> None:
    path = tmp_path / "revocations.bin"
    old = made(IDS[0])
    save_revocations(path, old)
    program = (
        "import pathlib, resource, signal, sys\n"
        "from kakeya.core.files import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: write_atomically(pathlib.Path(sys.argv[1]), bytes(1000))\n"
        "except OSError: print('refused')\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "refused"
    assert load_revocations(path, PUBLIC) == old
    assert [each.name for each in tmp_path.iterdir()] == ["revocations.bin"]
