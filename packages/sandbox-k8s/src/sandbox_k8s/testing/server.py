"""HTTP: requests in, answers of `Objects` and streams out."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from aiohttp import web

from . import discovery, paths
from .answers import (
    RefusalError,
    bad_request,
    no_such_resource,
    version_too_large,
    wrong_method,
)
from .lists import listed
from .objects import Objects, Target
from .rights import REVIEW_PATH, Rights, empty_list
from .selectors import matcher
from .store import RESOURCES, Object
from .streaming import streamed
from .watches import watched

MOST_BODY_BYTES = 3_145_728
_SUBRESOURCES = ("", "status", "eviction")
_JSON_TYPES = ("", "application/json")
_READABLE = ("application/json", "application/*", "*/*")

Stream: TypeAlias = Callable[[web.Request, paths.Path, Object], Awaitable[web.StreamResponse]]


class ApiServer:
    """Answers requests.

    Attributes:
        streams: What answers ``log``, ``exec``, ``portforward`` and ``proxy`` of a pod.
        token: What a client that shows one must show; one that shows none is let in, as kubectl shows none
            without TLS.
        requests: How many requests came, by method and what they named (``"GET pods"``, ``"WATCH pods"``).
        rights: What is forbidden.
    """

    def __init__(self, objects: Objects, token: str, streams: Mapping[str, Stream]) -> None:
        self.token = token
        self.streams = streams
        self.requests: dict[str, int] = {}
        self.rights = Rights()
        self._objects = objects
        self._store = objects.store
        self._connections: set[asyncio.Transport] = set()

    def cut(self) -> None:
        """Cut all connections in mid answer, as a server that is killed."""
        for transport in list(self._connections):
            transport.abort()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._connections.add(transport)
        try:
            return await self._answer(request)
        except RefusalError as refusal:
            headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
            return web.json_response(refusal.body(), status=refusal.code, headers=headers)
        finally:
            self._connections.discard(transport)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if given is not None and given != f"Bearer {self.token}":
            raise RefusalError(401, "Unauthorized", "Unauthorized")
        found = discovery.answer(request.path.rstrip("/"))
        if found is not None:
            return web.json_response(found)
        if request.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        if request.path == REVIEW_PATH and request.method == "POST":
            body = await self._body(request, "SelfSubjectAccessReview")
            return web.json_response(self.rights.review(body), status=201)
        none = empty_list(request.path, self._store.version) if request.method == "GET" else None
        if none is not None:
            return web.json_response(none)
        if not request.path.startswith("/api/v1/"):
            return web.Response(status=404, text="404 page not found\n")
        path = paths.read(request.path.removeprefix("/api/v1/"))
        self._count(request, path.target)
        self.rights.check(request.method, path.target, watches=_is_watch(request.query))
        if path.target.sub in self.streams:
            return await self.streams[path.target.sub](request, path, self._objects.get(path.target))
        if path.target.sub not in _SUBRESOURCES:
            raise no_such_resource()
        _check_accepted(request.headers.get("Accept", "*/*"))
        if not path.target.name:
            return await self._collection(request, path.target)
        return await self._object(request, path.target)

    async def _collection(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = dict(request.query)
        if request.method == "POST":
            body = await self._body(request, RESOURCES[target.plural].kind)
            return web.json_response(self._objects.create(target, query, body), status=201)
        namespace = target.namespace or None
        selected = matcher(target.plural, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if request.method == "GET" and _is_watch(query):
            lines = watched(self._store, target.plural, namespace, query, selected)
            return await streamed(request, lines, "application/json")
        if request.method == "GET":
            await self._wait_for_version(query)
            return web.json_response(listed(self._store, target.plural, namespace, query, selected))
        if request.method == "DELETE":
            options = await self._options(request)
            answer = listed(self._store, target.plural, namespace, query, selected)
            for item in answer["items"]:
                metadata = item["metadata"]
                one = Target(target.plural, metadata.get("namespace", ""), metadata["name"])
                self._objects.delete(one, query, options)
            return web.json_response(answer)
        raise wrong_method()

    async def _object(self, request: web.Request, target: Target) -> web.Response:
        query = dict(request.query)
        kind = RESOURCES[target.plural].kind
        if target.sub == "eviction":
            if request.method != "POST":
                raise wrong_method()
            body = await self._body(request, "Eviction")
            return web.json_response(self._objects.evict(target, query, body), status=201)
        if request.method == "GET":
            await self._wait_for_version(query)
            return web.json_response(self._objects.get(target))
        if request.method == "PUT":
            self._objects.get(target)
            return web.json_response(self._objects.update(target, query, await self._body(request, kind)))
        if request.method == "PATCH":
            data = await _read(request)
            return web.json_response(self._objects.patch(target, query, request.content_type, data))
        if request.method == "DELETE" and not target.sub:
            return web.json_response(self._objects.delete(target, query, await self._options(request)))
        raise wrong_method()

    async def _wait_for_version(self, query: Mapping[str, str]) -> None:
        """A version that is not reached yet is waited for, 3 s at most."""
        asked = query.get("resourceVersion", "")
        if asked.isdecimal() and int(asked) > self._store.version:
            await asyncio.sleep(3.0)
            if int(asked) > self._store.version:
                raise version_too_large(int(asked), self._store.version)

    async def _body(self, request: web.Request, kind: str) -> Object:
        data = await _read(request)
        if request.headers.get("Content-Type", "").partition(";")[0] not in _JSON_TYPES:
            message = (
                "the body of the request was in an unknown format - accepted media types include: "
                "application/json, application/yaml, application/vnd.kubernetes.protobuf"
            )
            raise RefusalError(415, "UnsupportedMediaType", message)
        return _parsed(data, kind)

    async def _options(self, request: web.Request) -> Object:
        data = await _read(request)
        return _parsed(data, "DeleteOptions") if data.strip() else {}

    def _count(self, request: web.Request, target: Target) -> None:
        verb = "WATCH" if not target.name and _is_watch(request.query) else request.method
        named = f"{verb} {target.plural}" + (f"/{target.sub}" if target.sub else "")
        self.requests[named] = self.requests.get(named, 0) + 1


def _parsed(data: bytes, kind: str) -> Object:
    try:
        body: Any = json.loads(data)
    except ValueError as problem:
        raise bad_request(
            f"the object provided is unrecognized (must be of type {kind}): couldn't get version/kind; json "
            f"parse error: {problem} ({data[:32].decode('utf-8', 'replace')})"
        ) from problem
    if not isinstance(body, dict):
        raise bad_request(f"the object provided is unrecognized (must be of type {kind})")
    return body  # pyright: ignore[reportUnknownVariableType]


async def _read(request: web.Request) -> bytes:
    data = bytearray()
    async for part in request.content.iter_any():
        data += part
        if len(data) > MOST_BODY_BYTES:
            message = f"Request entity too large: limit is {MOST_BODY_BYTES}"
            raise RefusalError(413, "RequestEntityTooLarge", message)
    return bytes(data)


def _is_watch(query: Mapping[str, str]) -> bool:
    return query.get("watch", "").lower() not in ("", "0", "false")


def _check_accepted(accept: str) -> None:
    kinds = {one.partition(";")[0].strip() for one in accept.split(",")}
    if not kinds & {*_READABLE}:
        message = (
            "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, "
            "application/vnd.kubernetes.protobuf"
        )
        raise RefusalError(406, "NotAcceptable", message)
