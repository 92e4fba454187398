"""Machines of a fleet exchange what they prefilled, within a tenant and no further.

Each is a network namespace with `kakeya-node` as a person runs it, and a real model.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import netns
from tests.node.test_three_namespaces import HTTP, Mini, within

pytestmark = [netns.needs_netns(), pytest.mark.slow]
CARD_S = 8.0
"""A first card is told of at the next look for changes, and travels at once."""
ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=120)
connection.request("POST", "/v1/chat/completions", sys.stdin.read(),
                   {"content-type": "application/json"})
answer = connection.getresponse()
print(json.dumps([answer.status, json.loads(answer.read())]))
"""


def ask(mini: Mini, prompt: str) -> tuple[str, int]:
    """What a node answers, and how many tokens of the prompt it did not compute."""
    request = {
        "model": f"of-{mini.label}",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "temperature": 0,
    }
    done = subprocess.run(
        mini.machine.command(sys.executable, "-c", ASK, HTTP),
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    status, said = json.loads(done.stdout)
    if status != 200:
        return "", -1
    cached: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["message"]["content"], cached


def prompt_of(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(
        rng.choice(("the", "cat", "of", "red", "house", "in", "time")) for _ in range(400)
    )


def exchanged(mini: Mini) -> dict[str, Any]:
    found: dict[str, Any] = mini.kakeya("status")["prefixes"]["peers"]
    return found


@pytest.fixture
def minis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mini, Mini, Mini]]:
    """Two of one tenant and one of another, with one key."""
    (tmp_path / "key").write_text("k" * 32)
    monkeypatch.setenv("KAKEYA_PRECACHE_KEY_FILE", str(tmp_path / "key"))
    with netns.network(3) as machines:
        one, two, three = (Mini(f"mini-{n}", m, tmp_path / str(n)) for n, m in enumerate(machines))
        for mini, tenant in ((one, "acme"), (two, "acme"), (three, "other")):
            mini.folder.mkdir()
            monkeypatch.setenv("KAKEYA_PRECACHE_TENANT", tenant)
            join: tuple[str, ...] = ()
            if mini is one:
                one.kakeya("init", "--label", one.label)
            else:
                join = ("--join", one.kakeya("invite")["token"])
            # By a name of its own: the request would go to the machine that has the prompt warm.
            mini.start("--model", f"of-{mini.label}=kakeya-tiny", *join)
        for mini in (one, two, three):
            within(90, lambda mini=mini: ask(mini, "hi")[1] >= 0)
        yield one, two, three


def test_prompts_come_from_machines_of_the_same_tenant_and_from_no_other(
    minis: tuple[Mini, Mini, Mini],
) -> None:
    one, two, three = minis
    prompts = [prompt_of(seed) for seed in range(6)]
    cold = [ask(one, prompt) for prompt in prompts]
    assert [cached for _, cached in cold] == [0] * len(prompts)
    time.sleep(CARD_S)
    answers = [ask(two, prompt) for prompt in prompts]
    assert [text for text, _ in answers] == [text for text, _ in cold]
    # A machine that tests keep busy is late now and then.
    assert max(cached for _, cached in answers) > 512
    assert exchanged(two)["fetched_tokens"] > 512
    strangers = [ask(three, prompt) for prompt in prompts[:2]]
    assert strangers == cold[:2]
    assert exchanged(three)["asked"] == exchanged(three)["fetched_blocks"] == 0
