"""A small server that speaks the part of the Hugging Face hub's API that `huggingface_hub` reads files with."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
LATER = "decade" * 6 + "deca"


@dataclass
class Repository:
    """One model or data set: its files by commit, and its branches."""

    files: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    gated: bool = False


@dataclass
class Hub:
    """What the server has: repositories by `models/owner/name` or `datasets/owner/name`, and what it was asked."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def downloads(self) -> list[str]:
        """Names of the files that were sent whole."""
        return [asked.rpartition("/")[2] for asked in self.requests if asked.startswith("GET") and "/resolve/" in asked]


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A running hub on a free port of this host."""
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.served.requests.append(f"{self.command} {path}")
        parts = path.split("/")
        if parts[0] == "api":
            return self._api(f"{parts[1]}/{parts[2]}/{parts[3]}", parts[4:])
        kind = "models" if parts[0] != "datasets" else "datasets"
        owner, name, _, revision, *file = parts if kind == "models" else parts[1:]
        repository = self.served.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        if repository.gated:
            return self._refuse(403, "GatedRepo")
        commit = repository.branches.get(revision, revision)
        content = repository.files.get(commit, {}).get("/".join(file))
        if content is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        return self._send(200, content, headers)

    def _api(self, key: str, rest: list[str]) -> None:
        repository = self.served.repositories.get(key)
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        asked = rest[1] if len(rest) > 1 else "main"
        commit = repository.branches.get(asked, asked)
        if commit not in repository.files:
            return self._refuse(404, "RevisionNotFound")
        files = repository.files[commit]
        if rest and rest[0] == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ]
            return self._send(200, json.dumps(entries).encode())
        about = {
            "id": key.partition("/")[2],
            "sha": commit,
            "private": False,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
        }
        return self._send(200, json.dumps(about).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
