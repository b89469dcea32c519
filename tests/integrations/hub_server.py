"""A small hub on this machine: the routes that snapshot_download, create_repo and upload_folder use, answering as the hub does."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlparse

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories (files by name), what is private and what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.asked: list[str] = []
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json")

    def _answer(self) -> None:
        path = urlparse(self.path).path
        self.hub.asked.append(f"{self.command} {path}")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        parts = path.strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if repo in self.hub.repos:
                self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}, 409)
                return
            self.hub.repos[repo] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.hub.private.add(repo)
            self._json({"url": f"{self.hub.url}/{repo}", "id": "1", "name": repo})
            return
        if parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
            return
        repo = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        files = self.hub.repos.get(repo)
        if files is None:
            self._send(401, b'{"error":"Invalid username or password."}', X_Error_Code="RepoNotFound")
        elif parts[:2] != ["api", "models"]:
            data = files.get("/".join(parts[4:]))
            if data is None:
                self._send(404, X_Error_Code="EntryNotFound")
            else:
                self._send(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=SHA)
        elif len(parts) > 5 and parts[4] == "revision" and parts[5] not in ("main", "v1", SHA):
            self._send(404, b"{}", X_Error_Code="RevisionNotFound")
        elif len(parts) > 4 and parts[4] == "tree":
            rows = [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files.items()]
            self._json(rows)
        elif len(parts) > 4 and parts[4] == "preupload":
            self._json({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]})
        elif len(parts) > 4 and parts[4] == "commit":
            for line in body.decode().splitlines():
                row = json.loads(line)
                if row["key"] == "file":
                    files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            self._json({"success": True, "commitOid": SHA, "commitUrl": f"{self.hub.url}/{repo}/commit/{SHA}", "hookOutput": ""})
        else:
            private = repo in self.hub.private
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repo, "modelId": repo, "sha": SHA, "private": private, "tags": [], "siblings": siblings, "downloads": 0})

    do_GET = do_HEAD = do_POST = _answer


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
