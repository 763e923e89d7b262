"""A server that speaks the few endpoints of the hub which a snapshot download asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str]  # branch, tag or commit -> commit
    token: str | None = None  # who has it may read; None: everyone


@dataclass
class Hub:
    repositories: dict[str, Repository]
    url: str = ""
    downloads: list[str] = field(default_factory=list)  # "repository/file" of each GET

    @contextmanager
    def running(self) -> Iterator["Hub"]:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        owner, name, verb, revision, *rest = parts[2:] if is_api else parts
        repository = self.hub.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        token = repository.token
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            return self._refuse(401, "GatedRepo")
        commit = repository.revisions.get(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if is_api:
            return self._send_json(_info(repository, commit, verb))
        file = "/".join(rest)
        if file not in repository.files:
            return self._refuse(404, "EntryNotFound")
        if body:
            self.hub.downloads.append(f"{owner}/{name}/{file}")
        return self._send(repository.files[file], commit, body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "Access to this model is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send(self, data: bytes, commit: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _info(repository: Repository, commit: str, verb: str) -> object:
    if verb == "tree":
        return [
            {
                "type": "file",
                "path": path,
                "size": len(data),
                "oid": hashlib.sha1(data).hexdigest(),
            }
            for path, data in repository.files.items()
        ]
    siblings = [{"rfilename": path} for path in repository.files]
    return {"id": "m", "sha": commit, "siblings": siblings}
