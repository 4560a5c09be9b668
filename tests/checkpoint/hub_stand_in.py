"""A Hub on this machine: as much of its HTTP interface as the real client needs to create, commit and download.

It keeps what it is sent in memory. The client under test is huggingface_hub itself, pointed here by HF_ENDPOINT.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn:
    """`with StandIn() as hub`: hub.address, hub.files (repo -> path -> bytes), hub.created, hub.commits."""

    def __init__(self, *, refuse: int | None = None):
        self.files: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.commits: list[str] = []
        self.refuse = refuse

    def __enter__(self) -> "StandIn":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                if "Content_Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self.chunks()
                if hub.refuse:
                    return self.answer(hub.refuse, b'{"error": "no"}', X_Error_Message="no")
                self.answer(200, json.dumps(hub.post(self.path, body)).encode())

            def chunks(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return b""
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def do_GET(self) -> None:
                found = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)", self.path)
                if found and found[2] in hub.files.get(found[1], {}):
                    content = hub.files[found[1]][found[2]]
                    etag = f'"{hashlib.sha256(content).hexdigest()}"'
                    headers = {"ETag": etag, "X_Repo_Commit": COMMIT, "Content_Length": str(len(content))}
                    return self.answer(200, content, **headers)
                found = re.match(r"/api/models/([^/]+/[^/]+)/(revision|tree)/", self.path)
                if found and found[1] in hub.files:
                    return self.answer(200, json.dumps(hub.describe(found[1], found[2])).encode())
                self.answer(404, b'{"error": "not here"}', X_Error_Code="RepoNotFound")

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def describe(self, repo: str, what: str) -> Any:
        names = sorted(self.files[repo])
        if what == "tree":
            return [{"type": "file", "path": n, "size": len(self.files[repo][n]), "oid": COMMIT} for n in names]
        siblings = [{"rfilename": name} for name in names]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}

    def post(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            owner, name = self.created[-1].get("organization") or "me", self.created[-1]["name"]
            return {"url": f"{self.address}/{owner}/{name}", "name": f"{owner}/{name}", "id": f"{owner}/{name}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        repo = re.match(r"/api/models/([^/]+/[^/]+)/commit/", path)
        assert repo, path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.commits.append(line["value"]["summary"])
            else:
                content = base64.b64decode(line["value"]["content"])
                self.files.setdefault(repo[1], {})[line["value"]["path"]] = content
        return {"success": True, "commitUrl": f"{self.address}/{repo[1]}/commit/{COMMIT}", "commitOid": COMMIT}
