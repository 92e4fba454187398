"""Files of an identity (S4.33: a damaged key stops the start and is never drawn anew), dates."""

from __future__ import annotations

import random
import shutil
import stat
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.fleet.identity.authority import authority_of, create_fleet, new_fleet
from kakeya.fleet.identity.certificates import BACKDATED_S, DAY_S, Untrusted
from kakeya.fleet.identity.identity import (
    AUTHORITY,
    AUTHORITY_KEY,
    CERTIFICATE,
    FOLDER,
    KEY,
    Identity,
    load_identity,
    load_peers,
    renewed,
    save_certificate,
    save_identity,
)
from kakeya.wire.security import CertRole

NOW = 1_700_000_000.0
FILES = (KEY, CERTIFICATE, AUTHORITY, AUTHORITY_KEY)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    create_fleet(tmp_path, "mini-1", NOW)
    return tmp_path


def member_of(identity: Identity, label: str = "mini-2", **options: object) -> Identity:
    authority = authority_of(identity)
    assert authority is not None
    return authority.new_identity(label, now=NOW, **options)  # type: ignore[arg-type]


def test_what_is_written_is_what_is_read(home: Path) -> None:
    identity = load_identity(home)
    assert identity is not None
    assert identity.label == "mini-1"
    assert identity.role is CertRole.MEMBER
    assert identity.is_authority
    assert len(identity.node_id) == 52
    assert len(identity.fleet) == 16
    assert load_identity(home) == identity


def test_a_data_directory_without_identity_has_none(tmp_path: Path) -> None:
    assert load_identity(tmp_path) is None
    assert load_peers(tmp_path) == ()


def test_private_keys_are_for_their_owner_alone_even_after_somebody_changed_that(
    home: Path,
) -> None:
    key = home / FOLDER / KEY
    for name in (KEY, AUTHORITY_KEY):
        assert stat.S_IMODE((home / FOLDER / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((home / FOLDER).stat().st_mode) == 0o700
    key.chmod(0o644)
    load_identity(home)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_fleet_is_founded_once_and_says_which_it_is(home: Path) -> None:
    identity = load_identity(home)
    assert identity is not None
    with pytest.raises(ConfigError, match=f"mini-1 of fleet {identity.fleet} already"):
        create_fleet(home, "mini-1", NOW)
    assert load_identity(home) == identity


@pytest.mark.parametrize("label", ["", "a\nb", "x" * 65, "\ud800"])
def test_a_label_that_no_certificate_carries_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(InvalidArgument, match="label"):
        create_fleet(tmp_path, label, NOW)
    assert load_identity(tmp_path) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_byte_is_named_and_nothing_crashes(home: Path, name: str) -> None:
    whole = load_identity(home)
    path = home / FOLDER / name
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        _loads_or_is_named(home, whole, name)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named_or_harmless_and_never_makes_another_node(
    home: Path, name: str
) -> None:
    whole = load_identity(home)
    path = home / FOLDER / name
    data = path.read_bytes()
    rng = random.Random(7)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        refused += not _loads_or_is_named(home, whole, name)
    assert refused > 300  # a flip in the armour's white space may be read over


def _loads_or_is_named(home: Path, whole: Identity | None, name: str) -> bool:
    try:
        found, complaint = load_identity(home), ""
    except ConfigError as problem:
        found, complaint = whole, problem.message
    assert found == whole
    assert not complaint or str(home / FOLDER / name) in complaint
    return not complaint


@pytest.mark.parametrize("name", [KEY, CERTIFICATE, AUTHORITY])
def test_a_missing_file_is_named_and_not_replaced(home: Path, name: str) -> None:
    path = home / FOLDER / name
    path.unlink()
    with pytest.raises(ConfigError, match=name):
        load_identity(home)
    assert not path.exists()


def test_the_key_of_another_node_is_refused(home: Path, tmp_path: Path) -> None:
    other = new_fleet("other", NOW)
    (home / FOLDER / KEY).write_bytes(other.tls.key)
    with pytest.raises(ConfigError, match=r"key\.pem is damaged: it is not the key of cert\.pem"):
        load_identity(home)


def test_the_certificate_of_another_fleet_is_refused(home: Path) -> None:
    other = new_fleet("other", NOW)
    (home / FOLDER / KEY).write_bytes(other.tls.key)
    (home / FOLDER / CERTIFICATE).write_bytes(other.tls.certificate)
    with pytest.raises(ConfigError, match=r"cert\.pem"):
        load_identity(home)


def test_a_member_without_the_authoritys_key_is_no_authority(home: Path, tmp_path: Path) -> None:
    (home / FOLDER / AUTHORITY_KEY).unlink()
    identity = load_identity(home)
    assert identity is not None
    assert not identity.is_authority
    assert authority_of(identity) is None


def test_an_identity_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    identity = new_fleet("mini-1", NOW)
    save_identity(tmp_path, identity, peers=("10.0.0.1:1", "10.0.0.2:1"))
    assert load_peers(tmp_path) == ("10.0.0.1:1", "10.0.0.2:1")
    with pytest.raises(ConfigError, match="exists"):
        save_identity(tmp_path, new_fleet("mini-2", NOW))
    assert load_identity(tmp_path) == identity
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_a_try_that_was_killed_leaves_no_private_key_behind(tmp_path: Path) -> None:
    left = tmp_path / f".{FOLDER}.abc"
    left.mkdir()
    (left / "ca-key.pem").write_text("secret")
    create_fleet(tmp_path, "mini-1", NOW)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_identity(blocked / "data", new_fleet("mini-1", NOW))


def test_a_damaged_list_of_peers_is_no_fault(home: Path) -> None:
    (home / FOLDER / "peers.txt").write_bytes(b"10.0.0.1:1\n\xff\xfe\n10.0.0.1:1\n")
    assert load_peers(home)[0] == "10.0.0.1:1"


def test_renewal_is_due_at_two_thirds_of_the_life() -> None:
    identity = member_of(new_fleet("mini-1", NOW), life_s=300.0)
    assert identity.not_before_at == NOW - BACKDATED_S
    assert identity.not_after_at == NOW + 300
    assert identity.renew_at == pytest.approx(NOW + 200)


def test_dates_that_do_not_fit_the_clock_are_told_with_what_mends_them() -> None:
    identity = new_fleet("mini-1", NOW)
    assert identity.fault_at(NOW) == ""
    assert identity.fault_at(NOW - BACKDATED_S + 1) == ""
    assert "5 days before its own certificate" in identity.fault_at(NOW - 7 * DAY_S)
    late = identity.fault_at(identity.not_after_at + 3 * DAY_S)
    assert "ended 3 days ago" in late
    assert "kakeya join TOKEN" in late


def test_a_renewed_certificate_keeps_the_node_what_it_is(home: Path) -> None:
    old = load_identity(home)
    assert old is not None
    authority = authority_of(old)
    assert authority is not None
    from kakeya.fleet.identity.certificates import make_request, read_key

    request = authority.read(make_request(read_key(old.tls.key), "mini-1"))
    later = NOW + 30 * DAY_S
    new = renewed(old, authority.issue(request, role=old.role, now=later), later)
    assert (new.node_id, new.fleet, new.role) == (old.node_id, old.fleet, old.role)
    assert new.is_authority
    assert new.not_after_at == old.not_after_at + 30 * DAY_S
    save_certificate(home, new)
    assert load_identity(home) == new

    for wrong in (
        authority.issue(request, role=CertRole.ADMIN, now=later + DAY_S),
        authority.issue(request, role=old.role, now=NOW),
        member_of(old).tls.certificate,
        new_fleet("other", later).tls.certificate,
        b"",
    ):
        with pytest.raises(Untrusted):
            renewed(new, wrong, later)


def test_secrets_are_not_in_what_gets_logged(home: Path) -> None:
    assert "PRIVATE" not in repr(load_identity(home))


def test_a_copied_data_directory_is_the_same_node(home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(home / FOLDER, copy / FOLDER)
    assert load_identity(copy) == load_identity(home)
