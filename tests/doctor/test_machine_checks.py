"""Checks of the machine as tables. The outputs of pmset are written after Apple's manual and
public examples: nothing here was recorded on, or run on, a Mac."""

from __future__ import annotations

import errno
import ipaddress
from pathlib import Path

import pytest

from kakeya.core.programs import Output
from kakeya.core.units import GIB, MIB
from kakeya.doctor import machine_checks as checks
from kakeya.doctor.machine import read_self_test
from kakeya.doctor.machine_checks import FileFact, SelfTest
from kakeya.doctor.report import Severity
from kakeya.fleet.paths.addresses import NetworkRank
from kakeya.fleet.paths.discovery import DiscoveryStats
from kakeya.fleet.paths.interfaces import Interface
from kakeya.fleet.placement.ring import RingEnvironment

MINI_AS_DELIVERED = """System-wide power settings:
Currently in use:
 standby              0
 Sleep On Power Button 1
 womp                 1
 autorestart          0
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by sharingd, powerd)
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
"""
MINI_AWAKE = """System-wide power settings:
 SleepDisabled		1
Currently in use:
 womp                 1
 powernap             1
 disksleep            0
 sleep                0
 displaysleep         10
"""
BOOK_ON_BATTERY = """Battery Power:
Active Profiles:
Battery Power		-1*
AC Power		-1
Currently in use:
 lowpowermode         1
 hibernatefile        /var/vm/sleepimage
 womp                 0
 powernap             0
 disksleep            0
 sleep                15
 hibernatemode        3
"""


@pytest.mark.parametrize(
    ("text", "level", "words", "command"),
    [
        (
            MINI_AS_DELIVERED,
            Severity.WARNING,
            "sleeps after 1 min",
            "sudo pmset -a sleep 0 powernap 0 disksleep 0 autorestart 1",
        ),
        (MINI_AWAKE, Severity.OK, "stays awake", ""),
        (BOOK_ON_BATTERY, Severity.WARNING, "does not wake it", "sudo pmset -a sleep 0 womp 1"),
        (
            MINI_AWAKE.replace("disksleep            0", "disksleep 10"),
            Severity.WARNING,
            "disk",
            "0",
        ),
        (
            MINI_AS_DELIVERED.replace("sharingd, powerd", "powerd, caffeinate")
            .replace("disksleep            10", "disksleep            0")
            .replace("autorestart          0", "autorestart          1"),
            Severity.OK,
            "stays awake while a node runs",
            "",
        ),
        (
            MINI_AWAKE.replace(" sleep                0", " sleep                5"),
            Severity.OK,
            "stays awake",
            "",
        ),
        (
            MINI_AWAKE + " autorestart          0\n",
            Severity.WARNING,
            "stays off after a power cut",
            "sudo pmset -a autorestart 1",
        ),
        (MINI_AWAKE + " autorestart          1\n", Severity.OK, "stays awake", ""),
        ("", Severity.WARNING, "did not tell", "pmset -g"),
        ("Currently in use:\n nonsense\n", Severity.WARNING, "did not tell", "pmset -g"),
    ],
)
def test_a_mac_that_sleeps_is_warned_of(
    text: str, level: Severity, words: str, command: str
) -> None:
    line = checks.check_sleep(checks.parse_pmset(text))
    assert line.level is level
    assert words in line.detail
    assert line.command.endswith(command)


def test_pmset_is_read_with_names_of_several_words_and_remarks() -> None:
    found = checks.parse_pmset(MINI_AS_DELIVERED)
    assert found["Sleep On Power Button"] == 1
    assert found["sleep"] == 1
    assert checks.parse_pmset(MINI_AWAKE)["SleepDisabled"] == 1
    assert "hibernatefile" not in checks.parse_pmset(BOOK_ON_BATTERY)


@pytest.mark.parametrize(
    ("free", "level"),
    [
        (2 * GIB, Severity.OK),
        (GIB, Severity.OK),
        (GIB - 1, Severity.WARNING),
        (64 * MIB, Severity.WARNING),
        (64 * MIB - 1, Severity.FAULT),
        (0, Severity.FAULT),
    ],
)
def test_room_on_the_disk(free: int, level: Severity) -> None:
    line = checks.check_disk(free, Path("/d"))
    assert line.level is level
    assert bool(line.command) is (level is not Severity.OK)


FOLDER = Path("/home/me/my data")
KEY = FOLDER / "identity" / "key.pem"


@pytest.mark.parametrize(
    ("facts", "level", "words", "command"),
    [
        ([], Severity.OK, "no node ran", ""),
        ([FileFact(path=FOLDER, mode=0o700, uid=7)], Severity.OK, "its owner alone", ""),
        (
            [FileFact(path=FOLDER, mode=0o755, uid=7)],
            Severity.WARNING,
            "mode 755",
            "chmod -R go-rwx '/home/me/my data'",
        ),
        (
            [FileFact(path=FOLDER, mode=0o755, uid=7), FileFact(path=KEY, mode=0o640, uid=7)],
            Severity.FAULT,
            "private key",
            "chmod -R go-rwx '/home/me/my data'",
        ),
        (
            [FileFact(path=FOLDER, mode=0o700, uid=0)],
            Severity.FAULT,
            "belongs to user 0",
            "sudo chown -R 7 '/home/me/my data'",
        ),
    ],
)
def test_files_are_their_owners_alone(
    facts: list[FileFact], level: Severity, words: str, command: str
) -> None:
    line = checks.check_files(facts, FOLDER, 7)
    assert line.level is level
    assert words in line.detail
    assert line.command == command


@pytest.mark.parametrize(
    ("number", "level", "command"),
    [
        (0, Severity.OK, ""),
        (errno.EADDRINUSE, Severity.FAULT, "lsof -nP -iTCP:50051 -sTCP:LISTEN"),
        (errno.EADDRNOTAVAIL, Severity.FAULT, "kakeya-node --bind 127.0.0.1:50051"),
        (errno.EACCES, Severity.FAULT, "kakeya-node --bind 127.0.0.1:0"),
    ],
)
def test_a_port_that_is_taken(number: int, level: Severity, command: str) -> None:
    line = checks.check_port("--bind", "10.0.0.1:50051", number)
    assert (line.level, line.command) == (level, command)


GOOD = SelfTest(mlx="0.32.4", device="cpu", is_same=True, share_off=1e-6)


@pytest.mark.parametrize(
    ("test", "level", "words"),
    [
        (GOOD, Severity.OK, "0.32.4 on cpu"),
        (SelfTest(mlx="0.31", device="gpu", share_off=0.5), Severity.FAULT, "wrong"),
        (SelfTest(mlx="0.31", share_off=float("nan")), Severity.FAULT, "by nan of the largest"),
        (SelfTest(error="No module named 'mlx'"), Severity.FAULT, "No module named"),
        (SelfTest(error="not done", is_unfinished=True), Severity.WARNING, "busy"),
    ],
)
def test_the_self_test_of_mlx(test: SelfTest, level: Severity, words: str) -> None:
    line = checks.check_mlx(test, "/opt/py")
    assert line.level is level
    assert words in line.detail
    if level is Severity.FAULT:
        assert line.command == "/opt/py -m pip install --upgrade mlx mlx-lm"
    if level is Severity.WARNING:
        assert line.command.startswith("/opt/py -m kakeya.mlx.selftest /")


@pytest.mark.parametrize(
    ("has_blas", "platform", "level"),
    [
        (True, "linux", Severity.OK),
        (False, "linux", Severity.WARNING),
        (False, "darwin", Severity.OK),
    ],
)
def test_blas(has_blas: bool, platform: str, level: Severity) -> None:
    line = checks.check_blas(SelfTest(has_blas=has_blas), platform)
    assert line is not None
    assert line.level is level
    if level is Severity.WARNING:
        assert line.command == "sudo apt-get install libopenblas0-pthread"


def test_blas_is_not_judged_when_the_child_said_nothing() -> None:
    assert checks.check_blas(SelfTest(error="x"), "linux") is None


def test_a_ring_that_was_meant_and_is_not_there() -> None:
    none = RingEnvironment(is_available=False, failure_reason="why")
    there = RingEnvironment(is_available=True, rank=1, world_size=2, backend="ring")
    assert checks.check_ring_probe(none, {}).level is Severity.OK
    assert checks.check_ring_probe(there, {"MLX_RANK": "1"}).detail == "rank 1 of 2 (ring)"
    line = checks.check_ring_probe(none, {"MLX_RANK": "1"})
    assert line.level is Severity.WARNING
    assert "why" in line.detail


@pytest.mark.parametrize(
    ("output", "error", "is_unfinished"),
    [
        (None, "could not be started", False),
        (Output(status=None, stdout="", stderr=""), "not done within", True),
        (Output(status=1, stdout="", stderr="Traceback\nImportError: no mlx\n"), "no mlx", False),
        (Output(status=-9, stdout="", stderr=""), "status -9", False),
        (Output(status=0, stdout="{}", stderr=""), "cannot be read", False),
        (Output(status=0, stdout="nothing", stderr=""), "cannot be read", False),
    ],
)
def test_a_self_test_that_fails_says_why(
    output: Output | None, error: str, is_unfinished: bool
) -> None:
    test = read_self_test(output)
    assert error in test.error
    assert test.is_unfinished is is_unfinished


def interface(name: str, ip: str, prefix: int, priority: NetworkRank) -> Interface:
    return Interface(
        name=name, index=1, ip=ipaddress.ip_address(ip), prefix=prefix, priority=priority
    )


WIFI = interface("en0", "192.168.1.7", 24, NetworkRank.LAN)
CABLE = interface("bridge0", "169.254.3.4", 16, NetworkRank.THUNDERBOLT)
BARE = interface("en0", "fe80::1", 64, NetworkRank.LAN)


@pytest.mark.parametrize(
    ("host", "link"),
    [
        ("192.168.1.9", "en0"),
        ("169.254.9.9", "bridge0"),
        ("192.168.2.9", ""),
        ("fe80::9%en0", "en0"),
        ("mini.local", ""),
    ],
)
def test_a_host_on_an_own_network_is_found(host: str, link: str) -> None:
    assert checks.link_to(host, (WIFI, CABLE, BARE)) == link


def test_networks_are_listed_and_missed() -> None:
    line = checks.check_networks((CABLE, WIFI, BARE), "darwin")
    assert line.detail == "169.254.3.4 on bridge0 (thunderbolt); 192.168.1.7 on en0 (lan)"
    assert checks.check_networks((), "darwin").level is Severity.WARNING
    assert checks.check_networks((), "linux").command == "ip address"


@pytest.mark.parametrize(
    ("mdns", "platform", "level", "words", "command"),
    [
        (DiscoveryStats(is_running=True, sightings=2), "darwin", Severity.OK, "seen now: 2", ""),
        (
            DiscoveryStats(is_running=True, is_silenced=True, errno=65),
            "darwin-arm64",
            Severity.WARNING,
            "(errno 65): System Settings > Privacy & Security > Local Network",
            "x-apple.systempreferences",
        ),
        (
            DiscoveryStats(is_running=True, is_silenced=True, errno=1),
            "linux",
            Severity.WARNING,
            "(errno 1): a firewall",
            "ip route get 224.0.0.251",
        ),
        (DiscoveryStats(), "linux", Severity.WARNING, "--peer and by gossip", "ip route get"),
    ],
)
def test_multicast(
    mdns: DiscoveryStats, platform: str, level: Severity, words: str, command: str
) -> None:
    line = checks.check_multicast(mdns, platform)
    assert line.level is level
    assert words in line.detail
    assert command in line.command


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({"http_proxy": "http://u:secret@proxy:3128"}, Severity.WARNING),
        ({"ALL_PROXY": "socks5://u:secret@proxy"}, Severity.WARNING),
        ({"HTTP_PROXY": "http://u:secret@proxy", "NO_PROXY": ".corp"}, Severity.WARNING),
        ({"HTTP_PROXY": "http://u:secret@proxy", "no_proxy": "localhost, 127.0.0.1"}, Severity.OK),
        ({"http_proxy": "http://u:secret@proxy", "NO_PROXY": "*"}, Severity.OK),
        ({"https_proxy": "http://u:secret@proxy", "grpc_proxy": "http://proxy"}, Severity.OK),
    ],
)
def test_a_proxy_is_named_by_its_variable(environ: dict[str, str], level: Severity) -> None:
    line = checks.check_proxy(environ)
    assert line is not None
    assert line.level is level
    assert all(name in line.detail for name in environ if name.lower() != "no_proxy")
    assert "secret" not in line.detail


def test_without_a_proxy_nothing_is_said_of_one() -> None:
    assert checks.check_proxy({"http_proxy": "", "no_proxy": "localhost", "PATH": "/bin"}) is None
