"""HTTP of the launcher: who may ask, what was asked, how the answer is sent.

The key is checked before a path or a request id is looked at: swe-rex 1.4.0 answers a wrong key with somebody
else's cached output when the request id is known.
"""

import hashlib
import hmac
import socket
import socketserver
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from .body import BadRequestError, Body, as_object, number
from .box import Box
from .execute import CutOffError
from .ownership import FencedError
from .replies import Answer, Asked, Replies, Reply, TooManyRequestsError
from .tenure import Caller

KEY_HEADER = "X-API-Key"
EPOCH_HEADER = "X-Sandbox-Epoch"
REQUEST_ID_HEADER = "X-Request-ID"
KEEP_HEADER = "X-Request-Keep"
_LONGEST_REQUEST_ID = 128
_KEEP_S = 600
_LONGEST_KEEP_S = 86400


@dataclass
class Call:
    """One request.

    Attributes:
        epoch: The owner that the caller says it is; None for a client that knows no epochs.
        connection: To notice that the caller went away.
        request_id: The caller's name for it; None when it has none.
    """

    box: Box
    query: Mapping[str, str]
    body: Body
    content_type: str
    epoch: int | None
    connection: socket.socket
    request_id: str | None = None

    def caller(self, cut: int | None = None) -> Caller:
        """Who asks.

        Args:
            cut: How its connection is shut when it is replaced: `socket.SHUT_RD` for a request whose body is
                read while it is carried out, `socket.SHUT_RDWR` for one whose answer is written meanwhile.
                None leaves it as it is.
        """
        return Caller(self.epoch, self.request_id, None if cut is None else self.connection, cut or 0)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            BadRequestError: It is none.
        """
        return self.head_and_rest()[0] if self.content_type == FRAMED else as_object(self.body.whole())

    def head_and_rest(self) -> tuple[dict[str, Any], bytes]:
        """The body as a line of JSON and the bytes behind it."""
        head, _, rest = self.body.whole().partition(b"\n")
        return as_object(head), rest


FRAMED = "application/x-sandbox"
Route = Callable[[Call], Answer]
"""A stream has begun when it is returned: whatever can be refused was."""


def epoch_of(text: str | None) -> int | None:
    """The epoch that a header names; None when there is no header: then it is a guest.

    Raises:
        BadRequestError: It is unreadable: whoever says that it is an owner must not pass as a guest.
    """
    return None if text is None else number(text.strip(), EPOCH_HEADER)


@dataclass
class Site:
    """What the server serves.

    Attributes:
        key_hash: Hex sha256 of the key; the key itself is never here.
        routes: By method and path.
        failure: Turns an exception of a route into an answer, given the path.
        stranger_s: How long a connection may be silent before it has shown the key: whoever has not must not
            hold a thread.
    """

    box: Box
    key_hash: str
    routes: Mapping[tuple[str, str], Route]
    failure: Callable[[str, Exception], Reply]
    stranger_s: float = 10.0
    replies: Replies = field(default_factory=Replies)


class Server(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """Serves a site on a socket that is already listening; a thread per connection."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, site: Site) -> None:
        handler = type("Handler", (_Handler,), {"site": site, "timeout": site.stranger_s})
        super().__init__(("", 0), handler)
        self.socket = listener

    def fileno(self) -> int:
        """The listening descriptor."""
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept; a unix socket's peer has no address."""
        connection, _ = self.socket.accept()
        return connection, ("", 0)

    def shutdown_request(self, request: Any) -> None:
        """Close one connection."""
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off is not news; anything else is written to the log."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "sandbox-k8s"
    sys_version = ""
    wbufsize = -1  # one packet for head and body
    disable_nagle_algorithm = False
    site: Site

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def handle_expect_100(self) -> bool:
        """Say at once that the body may come; it would stay in the buffer until the answer."""
        go_on = super().handle_expect_100()
        self.wfile.flush()
        return go_on

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they hold other people's commands."""

    def _answer(self) -> None:
        key = self.headers.get(KEY_HEADER, "")
        key_hash = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        if not hmac.compare_digest(key_hash, self.site.key_hash):
            self.close_connection = True
            detail = "Invalid API Key" if key else "Not authenticated"
            self._send(Reply.json({"detail": detail, "error": "auth", "message": detail}, status=401))
            return
        self.connection.settimeout(None)
        address = urlsplit(self.path)
        route = self.site.routes.get((self.command, address.path))
        if route is None:
            self.close_connection = True
            self._send(
                Reply.json({"detail": "Not Found", "error": "route", "message": self.path}, status=404)
            )
            return
        try:
            body = self._body()
        except BadRequestError as problem:
            self.close_connection = True  # nobody knows where the next request begins
            self._send(self.site.failure(address.path, problem))
            return
        epoch = None
        try:
            epoch = epoch_of(self.headers.get(EPOCH_HEADER))
            self.site.box.heard(epoch)
            answer = self._route(route, address.path, address.query, body, epoch)
        except TooManyRequestsError as problem:
            answer = Reply(str(problem).encode(), 503, "text/plain")  # like a proxy's: to be sent again
        except Exception as problem:
            answer = self.site.failure(address.path, problem)
        try:
            if not body.finish(1 << 20):
                self.close_connection = True
        except BadRequestError:
            self.close_connection = True
        if isinstance(answer, Reply):
            self._send(answer)
        else:
            self._stream(answer, epoch)

    def _body(self) -> Body:
        coding = self.headers.get("Transfer-Encoding", "identity").lower()
        if coding not in ("chunked", "identity"):
            raise BadRequestError(f"Transfer-Encoding {coding!r} is not supported: send chunks, or a length")
        length = number(self.headers.get("Content-Length", "0").strip(), "Content-Length")
        return Body(self.rfile, length, coding == "chunked")

    def _route(self, route: Route, path: str, query: str, body: Body, epoch: int | None) -> Answer:
        request_id = self.headers.get(REQUEST_ID_HEADER)
        if request_id is not None and len(request_id) > _LONGEST_REQUEST_ID:
            raise BadRequestError(
                f"{REQUEST_ID_HEADER} has {len(request_id)} characters, {_LONGEST_REQUEST_ID} at most"
            )
        call = Call(
            box=self.site.box,
            query=dict(parse_qsl(query, keep_blank_values=True)),
            body=body,
            content_type=self.headers.get("Content-Type", ""),
            epoch=epoch,
            connection=self.connection,
            request_id=request_id,
        )
        if request_id is None or self.command != "POST":
            return route(call)
        keep_s = min(number(self.headers.get(KEEP_HEADER, str(_KEEP_S)), KEEP_HEADER), _LONGEST_KEEP_S)
        return self.site.replies.once(
            Asked(path, epoch, request_id),
            keep_s,
            lambda: self._tried(route, path, call),
            lambda: self.site.box.check(epoch),
        )

    def _tried(self, route: Route, path: str, call: Call) -> Answer:
        """A failure is an answer too: a command must not run again because the news of its end was lost."""
        try:
            return route(call)
        except Exception as problem:
            if call.body.broken:
                raise  # it did not come whole: nothing was begun
            return self.site.failure(path, problem)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.body)

    def _stream(self, chunks: Generator[bytes], epoch: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            with closing(chunks):
                for chunk in chunks:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                    self.site.box.heard(epoch)
        except (FencedError, CutOffError):
            self.close_connection = True  # a stream without its end; the next request is told why
            return
        self.wfile.write(b"0\r\n\r\n")
