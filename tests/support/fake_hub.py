"""The Hugging Face hub's stand-in over HTTP on loopback, as far as its own client asks:
repositories are folders.

`models/ORG/NAME` and `datasets/ORG/NAME` below one folder, each of one revision. HF_ENDPOINT leads
the client here.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class FakeHub:
    def __init__(self, root: Path) -> None:
        self.root, self.url = root, ""
        self.asked: list[str] = []  # method and path of each request
        self.served: list[str] = []  # files whose contents were sent
        self.holds = ""  # a file that is sent by half, and the rest when this is another

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def serve(root: Path) -> Iterator[FakeHub]:
    hub = FakeHub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def commit(repo: Path) -> str:
    return hashlib.sha1(repo.name.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: FakeHub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        self._answer(body.get("paths", []))

    def do_GET(self) -> None:
        self._answer([])

    def _answer(self, wanted: list[str]) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[0] == "api" and len(path) >= 4:
            repo = self.hub.root.joinpath(*path[1:4])
            return (
                self._facts(repo, path[4:], wanted)
                if repo.is_dir()
                else self._missing("RepoNotFound")
            )
        kind = path.pop(0) if path[0] == "datasets" else "models"
        if len(path) > 4 and path[2] == "resolve":
            return self._file(self.hub.root.joinpath(kind, *path[:2]), "/".join(path[4:]))
        return self._missing("RepoNotFound")

    def _facts(self, repo: Path, rest: list[str], wanted: list[str]) -> None:
        files = {
            path.relative_to(repo).as_posix(): path
            for path in sorted(repo.rglob("*"))
            if path.is_file()
        }
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            entries = [_entry(name, path) for name, path in files.items() if name.startswith(below)]
            return self._send(json.dumps(entries).encode())
        if rest[:1] == ["paths-info"]:
            entries = [_entry(name, files[name]) for name in wanted if name in files]
            return self._send(json.dumps(entries).encode())
        if not rest or rest[:1] == ["revision"]:
            facts = {
                "id": f"{repo.parent.name}/{repo.name}",
                "sha": commit(repo),
                "private": False,
                "tags": [],
            }
            siblings = [{"rfilename": name} for name in files]
            return self._send(
                json.dumps(facts | {"siblings": siblings, "downloads": 0, "likes": 0}).encode()
            )
        return self._missing("EntryNotFound")

    def _file(self, repo: Path, name: str) -> None:
        path = repo / name
        if not path.is_file():
            return self._missing("EntryNotFound" if repo.is_dir() else "RepoNotFound")
        content = path.read_bytes()
        if self.command == "GET":
            self.hub.served.append(name)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        etag = {"X-Repo-Commit": commit(repo), "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        return self._send(
            content[start:], status=206 if "Range" in self.headers else 200, headers=etag
        )

    def _missing(self, code: str) -> None:
        self._send(b"{}", status=404, headers={"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, content: bytes, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            half = len(content) // 2
            self.wfile.write(content[:half])
            while self.hub.holds and self.path.endswith(self.hub.holds):
                time.sleep(0.02)
            self.wfile.write(content[half:])


def _entry(name: str, path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
