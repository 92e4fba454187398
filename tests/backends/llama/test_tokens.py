"""Token ids are those of llama.cpp, for any text."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kakeya.backends.llama.plan import plan_of
from kakeya.core.gguf import read_gguf
from kakeya.text.gguf import gguf_tokenizer

HARD = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "  two  blanks\t\ttabs\r\n\r\nlines \n  ",
    "I'll, you'VE, they're, 'tis; 12345 3.14 ½ ²³ Ⅻ",
    "e\u0301 \u00e9 \u212b \ufb01 \u1e9e",  # parts that a normalizer would join
    "漢字かな 한국어 नमस्ते עברית العربية ไทย",
    "👩‍👩‍👧 🇩🇪 🏴󠁧󠁢󠁥󠁮󠁧󠁿 \U0010ffff\u200b\ufeff\u2028",
    "\x00\x1b[0m\x7f\x85",
]
pieces = st.sampled_from(
    [*HARD, " ", "\n", "'s", "1", "Ab", "é", "字", "😀", "\u0301", "<|im_end|>"]
)
texts = st.one_of(st.text(max_size=60), st.lists(pieces, max_size=8).map("".join))


class Server(http.client.HTTPConnection):
    """A connection to a llama-server, kept from question to question."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)

    def tokens(self, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": True}
        self.request("POST", "/tokenize", json.dumps(body), {"Content-Type": "application/json"})
        found: list[int] = json.loads(self.getresponse().read())["tokens"]
        return found


@pytest.fixture(scope="module")
def server(
    llama_server: Path, real_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    path = Path(tmp_path_factory.mktemp("t", numbered=True)) / "1.sock"
    plan = plan_of(real_gguf, {"ctx_size": 256, "threads": 1})
    command = [str(word) for word in plan.command(llama_server)(path)]
    quiet = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(command, **quiet) as child:
        try:
            made = Server(path)
            latest = time.monotonic() + 60
            while not _is_up(path):
                assert time.monotonic() < latest
                time.sleep(0.05)
            yield made
            made.close()
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def _is_up(path: Path) -> bool:
    asked = Server(path)
    try:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    except OSError:
        return False
    finally:
        asked.close()


@pytest.fixture(scope="module")
def tokenizer(real_gguf: Path) -> Tokenizer:
    return gguf_tokenizer(read_gguf(real_gguf))


@pytest.mark.real
@pytest.mark.law
@given(text=texts)
def test_the_ids_of_a_text_are_those_of_llama_cpp(
    server: Server, tokenizer: Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).ids == server.tokens(text)


@pytest.mark.real
@pytest.mark.parametrize("text", HARD)
def test_a_hard_text(server: Server, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == server.tokens(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
