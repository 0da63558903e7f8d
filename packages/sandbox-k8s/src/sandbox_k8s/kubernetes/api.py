"""The few requests about pods that a life cycle needs: plain dicts in and out.

Made with the official client's connections and credentials, without its models (see `access`).
"""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, MutableSequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast
from urllib.parse import urlencode

import anyio
import msgspec

from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import ClusterError

from .access import ApiAccess
from .admission import classify_refusal, read_status, says_pod_is_missing
from .config import KubernetesConfig
from .listing import Listing, Page
from .records import annotations_of
from .threads import to_the_end

_log = logging.getLogger("sandbox_k8s")
_CONNECT_S = 5.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_PASSING = frozenset({429, 500, 502, 503, 504})
_NOT_DONE = frozenset({409, 429})
"""Answers of `_PASSING` failures that say that nothing was done."""
_PAGE = 100
"""Pods per answer: read in a thread, and still the interpreter is held for as long as the JSON is parsed."""
_UNAUTHORIZED, _EXPIRED = 401, 410
_MERGE = "application/merge-patch+json"


class ConflictError(ClusterError):
    """The object is not what the request took it for: it was changed, or replaced by one of the same name."""


class PodMissingError(ClusterError):
    """The API server itself says that there is no such pod."""


class Request(msgspec.Struct, frozen=True):
    """One request to the API server, before it is sent.

    Attributes:
        path: Below the server's address.
        body: JSON; None is an empty body.
    """

    method: str
    path: str
    query: dict[str, str] = {}
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"

    def send(self, pool: Any, access: ApiAccess, timeout_s: float) -> Any:
        """Send it and read the whole answer; blocks."""
        headers = {"Accept": "application/json", **access.options()["headers"]}
        url = access.base_url + self.path
        if self.query:
            url += "?" + urlencode(self.query)
        body = None
        if self.body is not None:
            headers["Content-Type"] = self.content_type
            body = json.dumps(self.body).encode()
        timeout = access.timeout(connect=_CONNECT_S, read=timeout_s)
        return pool.request(self.method, url, body=body, headers=headers, timeout=timeout, redirect=False)


class PodApi:
    """Requests about the pods of one namespace.

    Threads are bounded; a client of the library is never used by two of them at once, since that mixes
    answers up. Every request has a time-out below the one of the API server, and is tried again with pauses
    where that can help and cannot harm, for as long as an API server needs to start again.

    Attributes:
        requests: How many were sent.
        on_create: Told of each try to create something: the seconds that it took, and how it was refused.
        on_repeat: Told each time that a request is tried again.
    """

    def __init__(self, access: ApiAccess, config: KubernetesConfig, clock: Clock) -> None:
        self.access = access
        self.requests = 0
        self.on_create: Callable[[float, ClusterError | None], None] | None = None
        self.on_repeat: Callable[[], None] | None = None
        self._base = f"api/v1/namespaces/{config.namespace}"
        self._pods = f"{self._base}/pods"
        self._clock = clock
        self._timeout_s = config.api_timeout_s
        self._patience_s = config.api_patience_s
        self._limiter = anyio.CapacityLimiter(config.api_threads)
        self._idle: list[Any] = []
        self._impatient = False
        """Whether the server asked for a longer wait than there is patience, which is said once."""

    async def create(self, pod: Mapping[str, Any], request_annotation: str) -> dict[str, Any]:
        """Create a pod. If the answer is lost, the pod of that name is taken when it carries our request.

        Args:
            pod: With a fixed name.
            request_annotation: The annotation that holds a value of this very request.

        Raises:
            ClusterError: It was refused, or the API server stayed silent; then it may exist.
        """
        name: str = pod["metadata"]["name"]
        wanted: str = pod["metadata"]["annotations"][request_annotation]

        create = Request("POST", self._pods, body=pod)

        async def adopt() -> dict[str, Any] | None:
            found = await self.find(name)
            return found if found and annotations_of(found).get(request_annotation) == wanted else None

        return await self._settled(create, adopt, f"creating pod {name}")

    async def get(self, name: str) -> dict[str, Any]:
        """A pod.

        Raises:
            PodMissingError: There is none.
            ClusterError: The API server refused or stayed silent.
        """
        return await self._retried(Request("GET", f"{self._pods}/{name}"), f"reading pod {name}")

    async def find(self, name: str) -> dict[str, Any] | None:
        """A pod, or None when there is none."""
        try:
            return await self.get(name)
        except PodMissingError:
            return None

    async def list(self, selector: str) -> Listing:
        """All pods with those labels."""
        items: list[dict[str, Any]] = []
        version = ""
        async with aclosing(self.pages(selector)) as pages:
            async for page in pages:
                items = page.items if page.begins else items + page.items
                version = page.resource_version
        return Listing(items, version)

    async def pages(self, selector: str) -> AsyncGenerator[Page]:
        """All pods with those labels, some at a time; from the start again when a page has expired."""
        first = {"labelSelector": selector, "limit": str(_PAGE)}
        more: dict[str, str] = {}
        pause_s = _FIRST_PAUSE_S
        until = anyio.current_time() + self._patience_s
        while True:
            try:
                page = await self._retried(Request("GET", self._pods, first | more), "listing pods")
            except ClusterError as problem:
                if problem.code != _EXPIRED or not more or anyio.current_time() >= until:
                    raise
                more = {}
                await self._pause(problem, pause_s, until)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            yield Page(page["items"], page["metadata"]["resourceVersion"], begins=not more)
            if not page["metadata"].get("continue"):
                return
            more = {"continue": page["metadata"]["continue"]}

    async def events_version(self) -> str:
        """The version from which a watch of the namespace's events goes on."""
        read = Request("GET", f"{self._base}/events", {"limit": "1"})
        return (await self._retried(read, "listing events"))["metadata"]["resourceVersion"]

    async def annotate(
        self, name: str, annotations: Mapping[str, str], resource_version: str
    ) -> dict[str, Any]:
        """Change annotations if the pod is still at that version.

        If the answer is lost, the pod is read: one that carries all the values was changed by us, so one of
        them must be a value that nobody else can write.

        Raises:
            ConflictError: It was changed meanwhile.
            PodMissingError: It is gone.
        """
        body = {"metadata": {"annotations": dict(annotations), "resourceVersion": resource_version}}
        patch = Request("PATCH", f"{self._pods}/{name}", body=body, content_type=_MERGE)

        async def written() -> dict[str, Any] | None:
            found = await self.get(name)
            return found if annotations.items() <= annotations_of(found).items() else None

        return await self._settled(patch, written, f"changing pod {name}")

    async def delete(
        self, name: str, *, uid: str, resource_version: str | None = None, grace_s: int = 1
    ) -> None:
        """Delete this very pod, if it is still at that version when one is given. One that is gone is fine.

        Raises:
            ConflictError: The pod of that name is another one, or was changed meanwhile.
        """
        conditions = {"uid": uid}
        if resource_version is not None:
            conditions["resourceVersion"] = resource_version
        body = {"preconditions": conditions, "gracePeriodSeconds": grace_s}
        try:
            await self._retried(Request("DELETE", f"{self._pods}/{name}", body=body), f"deleting pod {name}")
        except PodMissingError:
            return

    async def ask(self, request: Request, what: str) -> dict[str, Any]:
        """Any other request that does no harm when it is sent twice.

        Args:
            request: For example about a node, or a create with ``dryRun``.
            what: Begins the message of an error: ``"reading node n1"``.
        """
        return await self._retried(request, what)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            manager = self._idle.pop()
            for key in manager.pools.keys():  # noqa: SIM118  (it cannot be iterated, to be safe with threads)
                # `clear` alone leaves the sockets to the garbage collector, and errors refer to their frames.
                manager.pools[key].close()
            manager.clear()

    async def _settled(
        self,
        request: Request,
        look: Callable[[], Any],
        what: str,
    ) -> dict[str, Any]:
        """A request that must not be done twice: after a lost answer, look whether it was done.

        An answer that is a refusal after a lost one may be the echo of our own success, so it is looked at
        too.
        """
        lost = False
        pause_s = _FIRST_PAUSE_S
        until = anyio.current_time() + self._patience_s
        while True:
            try:
                return await self._once(request, what)
            except ClusterError as problem:
                if lost and problem.code == 409:
                    done = await look()
                    if done is not None:
                        return done
                if anyio.current_time() >= until or not _passes(problem):
                    raise
                if problem.code not in _NOT_DONE:
                    lost = True
                    done = await look()
                    if done is not None:
                        return done
                await self._pause(problem, pause_s, until)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _retried(self, request: Request, what: str) -> dict[str, Any]:
        pause_s = _FIRST_PAUSE_S
        until = anyio.current_time() + self._patience_s
        while True:
            try:
                return await self._once(request, what)
            except ClusterError as problem:
                if anyio.current_time() >= until or not _passes(problem):
                    raise
                await self._pause(problem, pause_s, until)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _pause(self, problem: ClusterError, pause_s: float, until_s: float) -> None:
        """What the server asked for and up to as much again, or up to our own pause: not all at once.

        But never longer than until the last try, whatever it asked for.
        """
        asked_s = None if problem.diagnosis is None else problem.diagnosis.retry_after_s
        fraction = int(self._clock.new_id()[:8], 16) / (1 << 32)
        wait_s = pause_s * fraction if asked_s is None else asked_s * (1 + fraction)
        left_s = max(0.0, until_s - anyio.current_time())
        if asked_s is not None and asked_s > left_s:
            level = logging.DEBUG if self._impatient else logging.WARNING
            self._impatient = True
            text = "%s; it asks to wait %.0f s and is asked again in %.0f s (see api_patience_s)"
            _log.log(level, text, problem, asked_s, left_s)
        if self.on_repeat is not None:
            self.on_repeat()
        await anyio.sleep(min(wait_s, left_s))

    async def _once(self, request: Request, what: str) -> dict[str, Any]:
        took_s: list[float] = []
        problem: ClusterError | None = None
        work = partial(self._blocking, request, what, took_s)
        try:
            # Not abandoned when cancelled: a create that goes on unseen would leave a pod behind.
            return await to_the_end(work, self._limiter)
        except ClusterError as refused:
            problem = refused
            raise
        finally:
            if took_s and request.method == "POST" and self.on_create is not None:
                self.on_create(took_s[0], problem)

    def _blocking(self, request: Request, what: str, took_s: MutableSequence[float]) -> dict[str, Any]:
        pool = self._idle.pop() if self._idle else self.access.new_pool()
        self.requests += 1
        begun_s = self._clock.monotonic_s()
        try:
            answer = request.send(pool, self.access, self._timeout_s)
            if answer.status == _UNAUTHORIZED and self.access.renew():
                answer = request.send(pool, self.access, self._timeout_s)
            if answer.status >= 400:
                raise refusal(what, answer.status, answer.data, answer.headers)
            said = json.loads(answer.data)
            if not isinstance(said, dict):
                raise refusal(what, 0, f"the answer is a JSON {type(said).__name__}, not an object")
            return cast("dict[str, Any]", said)
        except ValueError as problem:
            raise refusal(what, 0, f"the answer is not JSON: {problem}") from problem
        except self.access.no_answer as problem:
            raise refusal(what, 0, f"{type(problem).__name__}: {problem}") from problem
        finally:
            took_s.append(self._clock.monotonic_s() - begun_s)
            self._idle.append(pool)


def _passes(problem: ClusterError) -> bool:
    """Whether trying again can help: too many requests, no answer, or a server's own trouble."""
    found = None if problem.diagnosis is None else problem.diagnosis.failure
    if found in ("api_overloaded", "request_too_large"):  # said with a 409 too; said with a 500
        return found == "api_overloaded"
    return problem.code == 0 or problem.code in _PASSING


def refusal(
    what: str, code: int, body: bytes | str | None, headers: Mapping[str, str] | None = None
) -> ClusterError:
    """The error for an answer that is no success; code 0 is no answer."""
    diagnosis = classify_refusal(code, body, dict(headers or {}))
    kind: type[ClusterError] = ClusterError
    if code == 409 and read_status(body).reason == "Conflict" and diagnosis.failure != "api_overloaded":
        kind = ConflictError
    elif says_pod_is_missing(code, body):
        kind = PodMissingError
    said = f"HTTP {code}" if code else "no answer"
    return kind(f"{what}: {said}: {diagnosis.failure}: {diagnosis.why}", diagnosis=diagnosis, code=code)
