"""A laptop uses the nodes of a fleet over HTTPS with an API key, from a machine of its own.

Each machine is a network namespace; everything runs as a person runs it. The laptop has the CA
certificate that `kakeya ca` prints and a key, and no identity.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import netns
from tests.netns import Machine

pytestmark = netns.needs_netns()
PORT = 8210
CHAT = """
import openai
client = openai.OpenAI(max_retries=0, timeout=120)
asked = {"model": "kakeya-tiny", "messages": [{"role": "user", "content": "hello"}]}
whole = client.chat.completions.create(**asked, max_tokens=8, temperature=0)
with client.chat.completions.create(**asked, max_tokens=8, temperature=0, stream=True) as stream:
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert said == whole.choices[0].message.content, (said, whole)
print(whole.usage.completion_tokens, whole._request_id)
"""


def kakeya(machine: Machine, folder: Path, *arguments: str, stdin: str = "") -> str:
    command = (sys.executable, "-m", "kakeya.cli.main", *arguments, "--data-dir", str(folder))
    done = machine.run(*command, limit_s=90, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass
class Shelf:
    """Two nodes, the first one the fleet's authority, and a laptop with what it was given."""

    minis: tuple[Machine, Machine]
    laptop: Machine
    folder: Path
    keys: dict[str, str]

    @property
    def authority(self) -> Path:
        return self.folder / "kakeya-ca.pem"

    def data(self, mini: int) -> Path:
        return self.folder / f"mini-{mini + 1}"

    def curl(self, mini: int, path: str, *flags: str, scheme: str = "https") -> tuple[int, str]:
        """Ask a mini from the laptop: the status and the body, 0 and the reason without any."""
        url = f"{scheme}://{self.minis[mini].ip}:{PORT}{path}"
        done = self.laptop.run("curl", "-sS", "-m", "60", "-w", "\n%{http_code}", *flags, url)
        body, _, status = done.stdout.rpartition("\n")
        return int(status), body or done.stderr

    def ask(self, mini: int, path: str, key: str = "") -> tuple[int, str]:
        shown = ("-H", f"Authorization: Bearer {key}") if key else ()
        return self.curl(mini, path, "--cacert", str(self.authority), *shown)

    def python(self, *arguments: str, mini: int, key: str) -> subprocess.CompletedProcess[str]:
        """Run Python on the laptop as `kakeya key add` says."""
        return self.laptop.run(
            "env",
            f"SSL_CERT_FILE={self.authority}",
            f"OPENAI_API_KEY={key}",
            f"KAKEYA_API_KEY={key}",
            f"OPENAI_BASE_URL=https://{self.minis[mini].ip}:{PORT}/v1",
            *(sys.executable, *arguments),
            limit_s=150,
        )


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    folder = tmp_path_factory.mktemp("shelf")
    with netns.network(3) as (one, two, laptop):
        found = Shelf((one, two), laptop, folder, {})
        kakeya(one, found.data(0), "init", "--label", "mini-1")
        for name, role in (("laptop", "infer"), ("owner", "admin")):
            found.keys[name] = kakeya(one, found.data(0), "key", "add", name, "--role", role)
        found.authority.write_text(kakeya(one, found.data(0), "ca"))
        start(one, found.data(0))
        token = kakeya(one, found.data(0), "invite")
        kakeya(two, found.data(1), "join", "-", "--label", "mini-2", stdin=token + "\n")
        found.keys["second"] = kakeya(two, found.data(1), "key", "add", "laptop")
        start(two, found.data(1), "--proposer", "ngram")
        yield found


def start(machine: Machine, data: Path, *flags: str) -> None:
    program = ("-m", "kakeya.node.daemon", "--data-dir", str(data), "--http", f"0.0.0.0:{PORT}")
    log = data.parent / f"{data.name}.log"
    spawned = machine.spawn(sys.executable, *program, *flags, log_file=log, limit_s=90)
    assert "ready" in spawned.first_line, spawned.log[-2000:]


def test_a_laptop_chats_over_tls_with_its_key(shelf: Shelf) -> None:
    done = shelf.python("-c", CHAT, mini=0, key=shelf.keys["laptop"])
    assert done.returncode == 0, done.stderr
    tokens, request_id = done.stdout.split()
    assert 0 < int(tokens) <= 8
    log = (shelf.folder / "mini-1.log").read_text()
    assert f"request_id={request_id}" in log
    assert shelf.keys["laptop"] not in log


def test_without_a_key_or_the_authority_or_tls_it_gets_nothing(shelf: Shelf) -> None:
    status, body = shelf.ask(0, "/v1/models")
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    status, reason = shelf.curl(0, "/v1/models")
    assert (status, "certificate" in reason) == (0, True), reason
    key = ("-H", f"Authorization: Bearer {shelf.keys['laptop']}")
    status, body = shelf.curl(0, "/v1/models", *key, scheme="http")
    assert (status, "https://" in json.loads(body)["error"]["message"]) == (400, True)
    assert shelf.ask(0, "/metrics", shelf.keys["laptop"])[0] == 403


def test_a_member_has_its_certificate_from_the_authority(shelf: Shelf) -> None:
    limit_mono = time.monotonic() + 90
    while (answer := shelf.ask(1, "/v1/models", shelf.keys["second"]))[0] != 200:
        assert time.monotonic() < limit_mono, answer
        time.sleep(0.2)
    assert json.loads(answer[1])["object"] == "list"
    assert shelf.ask(1, "/v1/models", shelf.keys["laptop"])[0] == 401  # the key of mini-1


def test_programs_of_the_mini_itself_need_neither(shelf: Shelf) -> None:
    assert json.loads(kakeya(shelf.minis[0], shelf.data(0), "status", "--json"))["node"]
    done = shelf.minis[0].run("curl", "-sS", f"http://127.0.0.1:{PORT}/v1/models")
    assert json.loads(done.stdout)["data"][0]["id"] == "kakeya-tiny"


def test_the_owner_sees_the_node_from_the_laptop(shelf: Shelf) -> None:
    node = f"https://{shelf.minis[0].ip}:{PORT}"
    command = ("-m", "kakeya.cli.main", "status", "--json", "--node", node)
    done = shelf.python(*command, mini=0, key=shelf.keys["owner"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["node"]["label"] == "mini-1"
    refused = shelf.python(*command, mini=0, key=shelf.keys["laptop"])
    assert (refused.returncode, "role admin" in refused.stderr) == (1, True)


def test_a_removed_key_counts_no_longer_and_a_new_one_at_once(shelf: Shelf) -> None:
    old = shelf.keys["laptop"]
    assert shelf.ask(0, "/v1/models", old)[0] == 200
    kakeya(shelf.minis[0], shelf.data(0), "key", "remove", "laptop")
    limit_mono = time.monotonic() + 30
    while shelf.ask(0, "/v1/models", old)[0] != 401:
        assert time.monotonic() < limit_mono
    new = kakeya(shelf.minis[0], shelf.data(0), "key", "add", "laptop")
    assert shelf.ask(0, "/v1/models", new)[0] == 200
