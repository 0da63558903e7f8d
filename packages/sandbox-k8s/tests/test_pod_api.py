"""Requests and watches against a server that answers as real ones were seen to, and cuts connections."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import anyio
import msgspec
import pytest
from sandbox_k8s import ClusterError, Injection, KubernetesConfig, SandboxStartError
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import ConflictError, PodApi, PodMissingError
from sandbox_k8s.kubernetes.starting import until_ready
from sandbox_k8s.kubernetes.streams import ApiStreams
from sandbox_k8s.kubernetes.watch import FollowedPod, PodWatch
from sandbox_k8s.stats import ClientStats

urllib3 = pytest.importorskip("urllib3")
pytestmark = pytest.mark.anyio

CONFIG = KubernetesConfig(injection=Injection(kind="baked"), namespace="ns", run="r", watch_s=1.0)
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = cast("Server", self.server)
        length = int(self.headers.get("Content-Length", 0))
        self.body = json.loads(self.rfile.read(length) or b"null")
        server.asked.append(f"{self.command} {self.path.partition('?')[0].rpartition('/ns/')[2]}")
        server.queries.append(self.path.partition("?")[2])
        kind = "events" if self.path.partition("?")[0].endswith("/events") else "pods"
        script = server.named.get(server.asked[-1]) or (server.events if kind == "events" else server.pods)
        (script.pop(0) if script else hold)(self)

    do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pods: list[Answer] = []
        self.events: list[Answer] = []
        self.named: dict[str, list[Answer]] = {}
        self.asked: list[str] = []
        self.queries: list[str] = []
        self.ending = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are part of the tests


def hold(handler: Handler) -> None:
    """A watch on which nothing happens, until the test is over."""
    begin_stream(handler)
    cast("Server", handler.server).ending.wait()
    handler.close_connection = True


def begin_stream(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


def answer(status: int, body: Any, **headers: str) -> Answer:
    def send(handler: Handler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return send


def cut(handler: Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def stream(*changes: dict[str, Any], end: str = "clean") -> Answer:
    """A watch's events; then its clean end, a cut, or silence on an open connection."""

    def send(handler: Handler) -> None:
        begin_stream(handler)
        for change in changes:
            line = json.dumps(change).encode() + b"\n"
            for piece in (line[: len(line) // 2], line[len(line) // 2 :]):
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if end == "clean":
            handler.wfile.write(b"0\r\n\r\n")
        elif end == "silent":
            cast("Server", handler.server).ending.wait()
        handler.close_connection = end != "clean"

    return send


def status(code: int, reason: str, kind: str = "pods", message: str = "") -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "details": {"kind": kind}}


def pod(name: str = "p", version: str = "5", uid: str = "u", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": version, **metadata},
        "status": {"phase": "Pending"},
    }


def listing(*pods: dict[str, Any], version: str = "10") -> Answer:
    return answer(200, {"items": list(pods), "metadata": {"resourceVersion": version}})


class PlainAccess:
    """As `ApiAccess`, for a server without TLS and credentials: needs no client library."""

    tls = None
    timeout = urllib3.Timeout
    no_answer = (urllib3.exceptions.HTTPError, OSError)

    def new_pool(self) -> Any:
        return urllib3.PoolManager(retries=False)

    def __init__(self, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}/"
        self.renewed = 0

    def options(self) -> dict[str, Any]:
        assert threading.current_thread() is not threading.main_thread(), "it may run a program for seconds"
        return {"headers": {}}

    def known_options(self) -> dict[str, Any]:
        return {"headers": {}}

    def renew(self) -> bool:
        self.renewed += 1
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ending.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def api(server: Server) -> Iterator[PodApi]:
    access = cast("ApiAccess", PlainAccess(server.server_address[1]))
    api = PodApi(access, CONFIG, SystemClock())
    yield api
    api.close()


NEW_POD = {"metadata": {"name": "p", "annotations": {"request": "mine"}}}


async def test_429_is_tried_again_after_the_time_that_the_server_names(server: Server, api: PodApi) -> None:
    """Flow control answers in plain text, not with a Status."""
    busy = answer(429, b"Too many requests, please try again later.\n", Retry_After="0")
    server.pods += [busy, answer(503, b""), answer(200, pod())]
    repeats: list[str] = []
    api.on_repeat = lambda: repeats.append("again")
    assert (await api.get("p"))["metadata"]["uid"] == "u"
    assert len(repeats) == 2
    assert server.asked == ["GET pods/p"] * 3


async def test_tries_are_bounded_by_time_not_by_number(server: Server, api: PodApi) -> None:
    """A server that is started again refuses for as long as that takes, however often it is asked."""
    server.pods += [answer(429, b"", Retry_After="0")] * 12 + [answer(200, {})]
    await api.delete("p", uid="u")
    assert len(server.asked) == 13


async def test_a_request_is_given_up_when_patience_ends(server: Server) -> None:
    access = cast("ApiAccess", PlainAccess(server.server_address[1]))
    api = PodApi(access, msgspec.structs.replace(CONFIG, api_patience_s=1e-9), SystemClock())
    server.pods += [answer(503, b"")] * 2
    with pytest.raises(ClusterError, match="HTTP 503"):
        await api.delete("p", uid="u")
    assert len(server.asked) == 1
    api.close()


async def test_a_wait_that_the_server_asks_for_is_no_longer_than_patience(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """One answer with Retry-After: 86400 held a request, and every start, for a day."""
    access = cast("ApiAccess", PlainAccess(server.server_address[1]))
    api = PodApi(access, msgspec.structs.replace(CONFIG, api_patience_s=0.2), SystemClock())
    server.pods += [answer(429, b"", Retry_After="86400")] * 4
    with anyio.fail_after(5), caplog.at_level(logging.WARNING, logger="sandbox_k8s"):
        for _ in range(2):
            with pytest.raises(ClusterError, match="HTTP 429"):
                await api.get("p")
    assert len(server.asked) == 4
    assert caplog.text.count("it asks to wait 86400 s") == 1
    api.close()


async def test_who_is_refused_for_what_he_is_asks_again_with_what_is_known_now(
    server: Server, api: PodApi
) -> None:
    """The token of a kubeconfig was replaced: every request was refused until the client was opened anew."""
    refused = answer(401, status(401, "Unauthorized"))
    server.pods += [refused, answer(200, pod()), refused, refused]
    assert (await api.get("p"))["metadata"]["uid"] == "u"
    with pytest.raises(ClusterError, match="credentials_refused"):
        await api.get("p")
    assert len(server.asked) == 4


async def test_an_answer_that_is_no_object_is_no_answer(server: Server, api: PodApi) -> None:
    server.pods += [answer(200, []), answer(200, pod())]
    assert (await api.get("p"))["metadata"]["uid"] == "u"


@pytest.mark.parametrize("lost", [cut, answer(504, status(504, "Timeout")), answer(200, b'{"meta')])
async def test_a_create_whose_answer_is_lost_is_looked_up(server: Server, api: PodApi, lost: Answer) -> None:
    server.pods += [lost, answer(200, pod(annotations={"request": "mine"}))]
    assert (await api.create(NEW_POD, "request"))["metadata"]["uid"] == "u"
    assert server.asked == ["POST pods", "GET pods/p"]


async def test_a_create_that_did_not_arrive_is_sent_again(server: Server, api: PodApi) -> None:
    server.pods += [cut, answer(404, status(404, "NotFound")), answer(201, pod())]
    await api.create(NEW_POD, "request")
    assert server.asked == ["POST pods", "GET pods/p", "POST pods"]


async def test_a_create_that_arrives_after_it_was_looked_for_is_adopted(server: Server, api: PodApi) -> None:
    missing, mine = answer(404, status(404, "NotFound")), answer(200, pod(annotations={"request": "mine"}))
    server.pods += [cut, missing, answer(409, status(409, "AlreadyExists")), mine]
    assert (await api.create(NEW_POD, "request"))["metadata"]["uid"] == "u"


async def test_a_pod_of_that_name_from_somebody_else_is_not_taken(server: Server, api: PodApi) -> None:
    theirs = answer(200, pod(annotations={"request": "theirs"}))
    server.pods += [cut, theirs, answer(409, status(409, "AlreadyExists")), theirs]
    with pytest.raises(ClusterError, match="name_taken"):
        await api.create(NEW_POD, "request")


async def test_what_cannot_pass_is_said_at_once(server: Server, api: PodApi) -> None:
    too_large = status(500, "", message="trying to send message larger than max (2 vs 1)")
    server.pods += [
        answer(403, status(403, "Forbidden", message="exceeded quota: q")),
        answer(500, too_large),
    ]
    for name in ("quota_exceeded", "request_too_large"):
        with pytest.raises(ClusterError, match=name):
            await api.create(NEW_POD, "request")
    assert server.asked == ["POST pods"] * 2


async def test_a_quota_that_others_change_at_that_moment_is_no_refusal(server: Server, api: PodApi) -> None:
    """kubernetes#67761, jenkinsci/kubernetes-plugin#2843: of many pods at once some were lost."""
    said = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
    for kind in ("resourcequotas", "clusterresourcequotas"):
        refused = status(409, "Conflict", kind=kind, message=said)
        server.pods += [answer(409, refused), answer(409, refused), answer(201, pod())]
        assert (await api.create(NEW_POD, "request"))["metadata"]["uid"] == "u"
    assert server.asked == ["POST pods"] * 6


async def test_a_change_whose_answer_was_lost_is_not_taken_for_somebody_elses(
    server: Server, api: PodApi
) -> None:
    done = answer(200, pod(version="6", annotations={"owner": "me", "x": "y"}))
    server.pods += [cut, answer(500, b""), answer(409, status(409, "Conflict")), done]
    with pytest.raises(ClusterError):  # the look itself may fail for good: then nobody knows, and it says so
        await api.annotate("missing", {"owner": "me"}, "5")
    server.pods[:] = [cut, done]
    assert (await api.annotate("p", {"owner": "me"}, "5"))["metadata"]["resourceVersion"] == "6"
    server.pods[:] = [answer(409, status(409, "Conflict"))]
    with pytest.raises(ConflictError):
        await api.annotate("p", {"owner": "me"}, "5")


async def test_only_the_api_servers_404_means_a_missing_pod(server: Server, api: PodApi) -> None:
    server.pods += [answer(404, b"pod does not exist"), answer(404, status(404, "NotFound"))]
    with pytest.raises(ClusterError) as found:
        await api.get("p")
    assert not isinstance(found.value, PodMissingError)
    with pytest.raises(PodMissingError):
        await api.get("p")


async def test_a_list_comes_page_by_page_and_begins_again_when_a_page_expired(
    server: Server, api: PodApi
) -> None:
    first = answer(200, {"items": [pod("a")], "metadata": {"continue": "more", "resourceVersion": "1"}})
    server.pods += [first, answer(410, status(410, "Expired")), first, listing(pod("b"))]
    found = await api.list("x=y")
    assert [one["metadata"]["name"] for one in found.items] == ["a", "b"]
    assert "continue=more" in server.queries[1]
    assert "continue" not in server.queries[2]


async def test_a_list_whose_pages_always_expire_is_given_up(server: Server) -> None:
    access = cast("ApiAccess", PlainAccess(server.server_address[1]))
    api = PodApi(access, msgspec.structs.replace(CONFIG, api_patience_s=0.3), SystemClock())
    first = answer(200, {"items": [pod("a")], "metadata": {"continue": "more", "resourceVersion": "1"}})
    server.pods += [first, answer(410, status(410, "Expired"))] * 500
    with anyio.fail_after(5), pytest.raises(ClusterError, match="HTTP 410"):
        await api.list("x=y")
    assert len(server.asked) < 60
    api.close()


@asynccontextmanager
async def watching(
    server: Server, api: PodApi, *names: str
) -> AsyncIterator[tuple[list[FollowedPod], ClientStats]]:
    stats = ClientStats()
    streams = ApiStreams(api.access)
    server.events.insert(0, answer(200, {"items": [], "metadata": {"resourceVersion": "3"}}))
    async with streams.opened(), anyio.create_task_group() as tasks:
        watch = PodWatch(api, streams, CONFIG, stats)
        followed = [watch.follow(name) for name in names]
        tasks.start_soon(watch.run)
        with anyio.fail_after(15):
            yield followed, stats
        tasks.cancel_scope.cancel()


async def until(followed: FollowedPod, version: str) -> None:
    while True:
        changed = followed.changed
        if followed.pod is not None and followed.pod["metadata"]["resourceVersion"] == version:
            return
        await changed.wait()


@pytest.mark.parametrize("end", ["clean", "cut"])
async def test_a_watch_that_ends_goes_on_from_its_last_version(server: Server, api: PodApi, end: str) -> None:
    """A cut looks like a time-out to some HTTP libraries; both mean the same."""
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}}
    changed = {"type": "MODIFIED", "object": pod(version="11")}
    later = {"type": "MODIFIED", "object": pod(version="13")}
    server.pods += [
        listing(pod(version="9")),
        stream(changed, bookmark, end=end),
        stream(later, end="silent"),
    ]
    async with watching(server, api, "p") as ([followed], stats):
        await until(followed, "13")
        versions = [query for query in server.queries if "labelSelector" in query and "watch=1" in query]
        assert ["resourceVersion=10" in versions[0], "resourceVersion=12" in versions[1]] == [True, True]
        assert (stats.lists, followed.gone) == (2, False)


@pytest.mark.parametrize("expired", ["event", "answer"])
async def test_an_expired_version_lists_again(server: Server, api: PodApi, expired: str) -> None:
    """Any restart of the API server does this; in an event of a 200 answer, or with the code itself.

    kubernetes-client/python#728, #2223, kubernetes-client/python-base#57, tomplus/kubernetes_asyncio#327: it
    ended the watch. kr8s-org/kr8s 0.20.15 asks again with the same version, without a pause.
    """
    gone = status(410, "Expired", message="too old resource version")
    refused = stream({"type": "ERROR", "object": gone}) if expired == "event" else answer(410, gone)
    server.pods += [listing(pod()), refused, listing(pod(version="40"), version="41"), hold]
    async with watching(server, api, "p") as ([followed], stats):
        await until(followed, "40")
        assert stats.watch_failures == 0


async def test_a_silent_connection_is_left(
    server: Server, api: PodApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half open: the other end is gone and nobody says so. The server would have ended the watch itself.

    kubernetes-client/python#1148, #1402, #2527: such a watch hung for ever.
    """
    monkeypatch.setattr("sandbox_k8s.kubernetes.streams._SILENCE_S", -0.8)
    later = {"type": "MODIFIED", "object": pod(version="13")}
    server.pods += [listing(pod()), stream(end="silent"), stream(later, end="silent")]
    async with watching(server, api, "p") as ([followed], _):
        await until(followed, "13")


async def test_a_pod_that_left_the_selector_is_asked_for_and_lives(server: Server, api: PodApi) -> None:
    left = {"type": "DELETED", "object": pod(version="11")}
    server.pods += [listing(pod()), stream(left, end="silent"), answer(200, pod(version="12"))]
    async with watching(server, api, "p") as ([followed], _):
        await until(followed, "12")
        assert not followed.gone
        assert server.asked.count("GET pods/p") == 1


async def test_a_deleted_pod_is_gone_and_one_that_a_list_misses_is_asked_for(
    server: Server, api: PodApi
) -> None:
    deleted = {"type": "DELETED", "object": pod(version="11", deletionTimestamp="2026-01-01T00:00:00Z")}
    gone = {"type": "ERROR", "object": status(410, "Expired")}
    server.pods += [listing(pod(), pod("q", "8")), stream(deleted, gone), listing(version="50")]
    server.named["GET pods/q"] = [answer(404, status(404, "NotFound"))]
    async with watching(server, api, "p", "q") as ([first, second], _):
        await until(first, "11")
        while not (first.gone and second.gone):
            await second.changed.wait()


async def test_events_reach_the_pod_they_are_about_and_are_bounded(server: Server, api: PodApi) -> None:
    def event(number: int, name: str = "p") -> dict[str, Any]:
        about = {"kind": "Pod", "name": name}
        return {
            "type": "ADDED",
            "object": {
                "metadata": {"uid": f"e{number}", "resourceVersion": str(number)},
                "involvedObject": about,
            },
        }

    server.pods += [listing(pod()), hold]
    server.events += [stream(*(event(number) for number in range(100)), event(100, "other"), end="silent")]
    async with watching(server, api, "p") as ([followed], _):
        while not followed.events or followed.events[-1]["metadata"]["uid"] != "e99":
            await followed.changed.wait()
        assert len(followed.events) == 64


async def test_a_refused_watch_is_said_and_tried_again(
    server: Server, api: PodApi, caplog: pytest.LogCaptureFixture
) -> None:
    refused = answer(403, status(403, "Forbidden", message='User "x" cannot watch resource "pods"'))
    server.pods += [
        listing(pod()),
        refused,
        stream({"type": "MODIFIED", "object": pod(version="13")}, end="silent"),
    ]
    with caplog.at_level(logging.WARNING, logger="sandbox_k8s"):
        async with watching(server, api, "p") as ([followed], stats):
            await until(followed, "13")
    assert stats.watch_failures == 1
    assert "permission_denied" in caplog.text


async def test_one_refusal_does_not_end_the_starts_that_wait(server: Server, api: PodApi) -> None:
    """A token that was just renewed: all starts in flight failed for good."""
    access = cast("PlainAccess", api.access)
    refused = answer(401, status(401, "Unauthorized"))
    later = {"type": "MODIFIED", "object": pod(version="13", deletionTimestamp="2026-01-01T00:00:00Z")}
    server.pods += [listing(pod()), refused, stream(later, end="silent")]
    async with watching(server, api, "p") as ([followed], stats):
        with pytest.raises(SandboxStartError, match="being deleted"):
            await until_ready(followed, CONFIG, lambda found: None)
        assert (stats.watch_failures, access.renewed) == (1, 1)


async def test_refusals_that_last_end_the_starts_that_wait(
    server: Server, api: PodApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_k8s.kubernetes.watch._SURE_S", 0.1)
    refused = answer(403, status(403, "Forbidden", message='User "x" cannot watch resource "pods"'))
    server.pods += [listing(pod()), *[refused] * 9]
    async with watching(server, api, "p") as ([followed], stats):
        with pytest.raises(ClusterError, match="permission_denied"):
            await until_ready(followed, CONFIG, lambda found: None)
        assert stats.watch_failures == 2


async def test_versions_that_expire_as_soon_as_they_are_listed_are_not_listed_without_a_pause(
    server: Server, api: PodApi
) -> None:
    """It listed all pods a thousand times per second for as long as that lasted."""
    gone = stream({"type": "ERROR", "object": status(410, "Expired")})
    server.pods += [*[listing(pod()), gone] * 3, listing(pod(version="40"), version="41"), hold]
    async with watching(server, api, "p") as ([followed], stats):
        begun_s = anyio.current_time()
        await until(followed, "40")
        assert anyio.current_time() - begun_s > 0.5, "at once, after 0.2 s, after 0.4 s"
        assert stats.watch_failures == 2


@pytest.mark.parametrize(
    "about", [{"kind": "Pod", "namespace": "ns"}, None], ids=["without a name", "about nothing"]
)
async def test_an_odd_event_does_not_end_the_client(
    server: Server, api: PodApi, about: dict[str, str] | None
) -> None:
    """Anybody who may write events ended every client of the namespace, and so its sandboxes."""
    metadata = {"uid": "e1", "resourceVersion": "4"}
    odd = {"type": "ADDED", "object": {"metadata": metadata, "involvedObject": about}}
    good = {"metadata": metadata, "involvedObject": {"kind": "Pod", "name": "p"}}
    goes_on = stream({"type": "ADDED", "object": good}, end="silent")
    server.pods += [listing(pod()), hold]
    again = answer(200, {"items": [], "metadata": {"resourceVersion": "5"}})
    server.events += [stream(odd), *([] if about else [again]), goes_on]
    async with watching(server, api, "p") as ([followed], stats):
        while not followed.events:
            await followed.changed.wait()
        assert stats.task_faults == (0 if about else 1)


async def test_a_line_that_is_no_json_begins_a_watch_anew(
    server: Server, api: PodApi, caplog: pytest.LogCaptureFixture
) -> None:
    def spoiled(handler: Handler) -> None:
        begin_stream(handler)
        handler.wfile.write(b"7\r\n<html>\n\r\n0\r\n\r\n")

    server.pods += [listing(pod()), spoiled, listing(pod(version="40"), version="41"), hold]
    async with watching(server, api, "p") as ([followed], stats):
        await until(followed, "40")
        assert stats.task_faults == 1
    assert "the watch of pods failed and goes on" in caplog.text


async def test_a_start_whose_pod_is_gone_without_a_trace_ends_at_once(server: Server, api: PodApi) -> None:
    """The API server was away while it was deleted: the start waited out its time, and held its turn."""
    gone = {"type": "ERROR", "object": status(410, "Expired")}
    server.pods += [listing(pod("q", "8")), stream(gone), listing(version="50")]
    server.named["GET pods/q"] = [answer(404, status(404, "NotFound"))]
    async with watching(server, api, "q") as ([followed], _):
        with pytest.raises(SandboxStartError, match="deleted: it is gone") as failed:
            await until_ready(followed, CONFIG, lambda found: None)
        assert failed.value.diagnosis is not None
        assert (failed.value.diagnosis.failure, failed.value.retryable) == ("deleted", True)
