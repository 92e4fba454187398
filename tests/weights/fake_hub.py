"""A hub on loopback: the answers of huggingface.co that a download by huggingface_hub needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class FakeHub:
    """Repositories by name, each a folder; with `lies` the digests that it tells are wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.lies = False
        self.gate = threading.Event()
        """A file is sent only when it is set."""
        self.gate.set()
        self.sent_bytes = 0
        self.address = ""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                self._info("/".join(path.split("/")[2:4]))
                return
            if path.count("/") < 4:
                self._say(404, {"error": "no such page"})
                return
            org, name, _, _, file = path.split("/", 4)
            data = (hub.repositories[f"{org}/{name}"] / file).read_bytes()
            start = 0
            if (wanted := self.headers.get("range")) is not None:
                start = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("accept-ranges", "bytes")
            if start:
                self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("content-length", str(len(data) - start))
            self.end_headers()
            if with_body:
                half = (len(data) + start) // 2
                self.wfile.write(data[start:half])
                hub.gate.wait(60)
                self.wfile.write(data[half:])
                hub.sent_bytes += len(data) - start

        def _info(self, name: str) -> None:
            if name in hub.gated:
                self._say(403, {"error": "gated"}, ("x-error-code", "GatedRepo"))
            elif name not in hub.repositories:
                self._say(404, {"error": "no"}, ("x-error-code", "RepoNotFound"))
            else:
                self._say(200, {"id": name, "sha": COMMIT, "siblings": self._siblings(name)})

        def _siblings(self, name: str) -> list[dict[str, object]]:
            folder = hub.repositories[name]
            found = []
            for path in sorted(one for one in folder.rglob("*") if one.is_file()):
                told: dict[str, object] = {
                    "rfilename": path.relative_to(folder).as_posix(),
                    "size": path.stat().st_size,
                }
                if path.suffix == ".safetensors":
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    digest = digest[::-1] if hub.lies else digest
                    told["lfs"] = {"sha256": digest, "size": told["size"], "pointerSize": 134}
                found.append(told)
            return found

        def _say(self, status: int, body: object, *headers: tuple[str, str]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
