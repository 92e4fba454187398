"""A fleet with identities on three machines: a request at the one without a model is answered by
the others over mutual TLS, and goes on when the machine that answers falls silent.

Each machine is a network namespace with `kakeya-node` as a person runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests import netns
from tests.node.test_three_namespaces import HTTP, Mini, within

pytestmark = [netns.needs_netns(), pytest.mark.slow]
MODEL = "kakeya-tiny-tools"
ASKED = {
    "model": MODEL,
    "prompt": "import os",
    "temperature": 0.7,
    "seed": 5,
    "max_tokens": 1500,
    "draft_policy": "off",
    "logit_bias": {"0": -100, "2": -100},
    "stream": True,
}
STREAM = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=120)
connection.request("POST", "/v1/completions", sys.stdin.read(),
                   {"content-type": "application/json"})
answer = connection.getresponse()
assert answer.status == 200, answer.read()
while line := answer.readline():
    sys.stdout.write(line.decode())
    sys.stdout.flush()
"""
GET = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=20)
connection.request("GET", sys.argv[2])
print(connection.getresponse().read().decode())
"""


def get(mini: Mini, path: str) -> Any:
    done = mini.machine.python("-c", GET, HTTP, path)
    return json.loads(done.stdout)


class Stream:
    """An answer that comes in; `begun` is set once there is a piece of it."""

    def __init__(self, mini: Mini) -> None:
        self.begun = threading.Event()
        self.pieces: list[str] = []
        self.errors: list[object] = []
        self._process = subprocess.Popen(
            mini.machine.command(sys.executable, "-c", STREAM, HTTP),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ASKED))
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        self.errors.append(chunk["error"])
                    self.pieces += [choice["text"] for choice in chunk.get("choices", ())]
                    self.begun.set()

    def text(self) -> str:
        self._reader.join(100)
        assert self._process.wait(10) == 0
        assert self.errors == []
        return "".join(self.pieces)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mini, Mini, Mini]]:
    with netns.network(3) as machines:
        folder = tmp_path_factory.mktemp("shelf")
        front, *minis = (
            Mini(f"mini-{number}", machine, folder / str(number))
            for number, machine in enumerate(machines, 1)
        )
        for mini in (front, *minis):
            mini.folder.mkdir()
        front.kakeya("init", "--label", front.label)
        front.start("--exchange-interval", "1")
        for mini in minis:
            token = front.kakeya("invite")["token"]
            mini.start("--join", token, "--model", MODEL, "--exchange-interval", "1")

        def are_offered() -> bool:
            nodes = get(front, "/api/v1/fleet")["nodes"]
            return [MODEL in str(node["models"]) for node in nodes].count(True) == 2

        within(40, are_offered)
        left, right = minis
        yield front, left, right


def test_an_answer_goes_on_when_the_machine_that_gives_it_falls_silent(
    shelf: tuple[Mini, Mini, Mini],
) -> None:
    front, *minis = shelf
    assert MODEL in str(get(front, "/v1/models"))
    whole = Stream(front).text()
    assert len(whole) > 2000
    before = get(front, "/api/v1/status")["routes"]["by_node"]
    stream = Stream(front)
    assert stream.begun.wait(30)
    after = get(front, "/api/v1/status")["routes"]["by_node"]
    (node_id,) = [one for one in after if after[one] > before.get(one, 0)]
    (lost,) = [mini for mini in minis if mini.node_id == node_id]
    lost.machine.cut(silently=True)
    assert stream.text() == whole
    assert get(front, "/api/v1/status")["routes"]["moved"] == 1
    lost.machine.heal()
