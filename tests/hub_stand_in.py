"""A small real HTTP server in the place of the Hugging Face Hub, and of any web server: the few endpoints that reading and pushing need.

hub.add("owner/name", {"data/train.parquet": b"..."}, card="---\n...")     a data set; `hub.url` is for HF_ENDPOINT
hub.web["/path"] = b"..."                                                  a plain file; `hub.url + "/path"`
hub.repositories["owner/model"]                                            what was pushed
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from stand_in import listening


@dataclass
class Repository:
    files: dict[str, bytes]
    card: dict[str, Any] | None = None

    @property
    def sha(self) -> str:
        return hashlib.sha1(json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()}).encode()).hexdigest()

    def describe(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        entry: dict[str, Any] = {"size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
        if name.endswith((".parquet", ".safetensors")):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry


@dataclass
class Hub:
    """What the server holds, and the requests that it saw."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    web: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    etags: bool = True
    cut_after: int | None = None  # bytes of any file, after which the connection breaks
    failing: int | None = None  # the status of every response

    def add(self, name: str, files: dict[str, bytes], card: dict[str, Any] | None = None, *, branch: str = "main") -> None:
        self.repositories[name if branch == "main" else f"{name}@{branch}"] = Repository(dict(files), card)

    def find(self, name: str, revision: str) -> Repository | None:
        main = self.repositories.get(name)
        if revision in ("main", "HEAD") or (main is not None and revision == main.sha):
            return main
        branches = {key: repository for key, repository in self.repositories.items() if key.startswith(f"{name}@")}
        found = (repository for key, repository in branches.items() if revision in (key.partition("@")[2], repository.sha))
        return next(found, None)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A stand-in that listens until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    with listening(Handler) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_POST(self) -> None:
        self._change()

    def do_PUT(self) -> None:
        self._change()

    def _get(self) -> None:
        hub, path = self.state, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {self.path}")
        if hub.failing is not None:
            return self._json({"error": "failing"}, hub.failing)
        if path in hub.web:
            return self._file(hub.web[path])
        if match := re.fullmatch(r"/api/(?:datasets|models)/([\w.-]+/[\w.-]+)(?:/revision/(.+))?", path):
            repository = hub.find(match[1], match[2] or "main")
            if repository is None:
                return self._missing("RepoNotFound" if match[1] not in hub.repositories else "RevisionNotFound")
            siblings = [{"rfilename": name, **repository.describe(name)} for name in repository.files]
            return self._json({"id": match[1], "sha": repository.sha, "siblings": siblings, "cardData": repository.card, "tags": []})
        if match := re.fullmatch(r"/api/datasets/([\w.-]+/[\w.-]+)/tree/(refs/convert/parquet|[^/]+)(?:/(.*))?", path):
            repository = hub.find(match[1], match[2])
            return self._missing("RevisionNotFound") if repository is None else self._json(_tree(repository, match[3] or ""))
        if match := re.fullmatch(r"/(?:datasets/)?([\w.-]+/[\w.-]+)/resolve/(refs/convert/parquet|[^/]+)/(.+)", path):
            repository = hub.find(match[1], match[2])
            if repository is None or match[3] not in repository.files:
                return self._missing("EntryNotFound")
            return self._file(repository.files[match[3]], {"X-Repo-Commit": repository.sha})
        return self._missing("RepoNotFound")

    def _change(self) -> None:
        hub, path = self.state, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if match := re.fullmatch(r"/api/(?:datasets|models)/([\w.-]+/[\w.-]+)/paths-info/(.+)", path):
            repository = hub.find(match[1], match[2])
            if repository is None:
                return self._missing("RepoNotFound")
            wanted = json.loads(body)["paths"] if b"{" in body[:1] else re.findall(r"paths=([^&]+)", unquote(body.decode()))
            folders = [name for name in wanted if any(file.startswith(f"{name}/") for file in repository.files)]
            return self._json([_entry(repository, name) for name in wanted if name in repository.files] + list(map(_folder, folders)))
        if path.startswith("/blobs/"):  # such a url carries its own permission
            hub.blobs[path.removeprefix("/blobs/")] = body
            return self._json({})
        if path == "/api/validate-yaml":
            known = b"license: nolicense" not in json.loads(body)["content"].encode()
            errors = [] if known else [{"message": '"license" must be one of [apache-2.0, mit]'}]
            return self._json({"errors": errors, "warnings": []}, 200 if known else 400)
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            wish = json.loads(body)
            name = f"{wish['organization']}/{wish['name']}"
            if wish["organization"] == "other":
                return self._json({"error": "You don't have the rights to create a model under the namespace other"}, 403)
            if name in hub.repositories:
                return self._json({"url": f"{hub.url}/{name}"}, 409)
            hub.add(name, {})
            return self._json({"url": f"{hub.url}/{name}"})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/preupload/main", path):
            if match[1].startswith("other/"):
                return self._missing("RepoNotFound")
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".onnx")) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            wish = json.loads(body)
            actions = {"upload": {"href": f"{hub.url}/blobs/"}}
            objects = [
                {**item, "actions": {"upload": {"href": actions["upload"]["href"] + item["oid"]}}} if item["oid"] not in hub.blobs else item
                for item in wish["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/main", path):
            repository = hub.repositories[match[1]]
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    repository.files[value["path"]] = hub.blobs[value["oid"]]
                elif operation["key"] == "deletedFile":
                    repository.files.pop(value["path"], None)
            commit = {"commitUrl": f"{hub.url}/{match[1]}/commit/{repository.sha}", "commitOid": repository.sha, "pullRequestUrl": None}
            return self._json({**commit, "success": True, "hookOutput": ""})
        return self._missing("RepoNotFound")

    def _file(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        status, begin, end = 200, 0, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, begin, end = 206, int(match[1]), min(len(data), int(match[2] or len(data) - 1) + 1)
        headers = {**(headers or {}), "Accept-Ranges": "bytes"}
        if self.state.etags:
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        if self.command != "HEAD":
            self.state.bytes_sent += end - begin
        self._send(data[begin:end], status, headers, cut=self.state.cut_after)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._send(b"", 404, {"X-Error-Code": code})

    def _send(self, data: bytes, status: int, headers: dict[str, str], *, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
            self.close_connection |= len(data[:cut]) < len(data)


def _tree(repository: Repository, folder: str) -> list[dict[str, Any]]:
    inside = [name for name in repository.files if name.startswith(f"{folder}/" if folder else "")]
    start = len(folder) + 1 if folder else 0
    files = [name for name in inside if "/" not in name[start:]]
    folders = sorted({name[: name.index("/", start)] for name in inside if "/" in name[start:]})
    return [*map(_folder, folders), *(_entry(repository, name) for name in files)]


def _folder(name: str) -> dict[str, Any]:
    return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}


def _entry(repository: Repository, name: str) -> dict[str, Any]:
    file = repository.describe(name)
    lfs = {"lfs": file["lfs"] | {"oid": file["lfs"]["sha256"]}} if "lfs" in file else {}
    return {"type": "file", "path": name, "oid": file["blobId"], "size": file["size"], **lfs}
