"""HTTP of the launcher: who may ask, what was asked, how the answer is sent.

The key is checked before a path or a request id is looked at: swe-rex 1.4.0 answers a wrong key with somebody
else's cached output when the request id is known.
"""

import hashlib
import hmac
import json
import socket
import socketserver
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from .box import Box, Caller
from .replies import Replies, Reply

KEY_HEADER = "X-API-Key"
EPOCH_HEADER = "X-Sandbox-Epoch"
REQUEST_ID_HEADER = "X-Request-ID"
LARGEST_JSON = 256 << 20


class BadRequestError(Exception):
    """The request cannot be understood."""


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
    body: "Body"
    content_type: str
    epoch: int | None
    connection: socket.socket
    request_id: str | None = None

    def caller(self, *, sends: bool = False) -> Caller:
        """Who asks; ``sends`` for a request whose body is read while it is carried out."""
        return Caller(self.epoch, self.request_id, self.connection if sends else None)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            BadRequestError: It is none.
        """
        return (
            self.head_and_rest()[0]
            if self.content_type == FRAMED
            else as_object(self.body.read(LARGEST_JSON))
        )

    def head_and_rest(self) -> tuple[dict[str, Any], bytes]:
        """The body as a line of JSON and the bytes behind it."""
        head, _, rest = self.body.read(LARGEST_JSON).partition(b"\n")
        return as_object(head), rest


FRAMED = "application/x-sandbox"
Route = Callable[[Call], Reply | Iterable[bytes]]


def as_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; an empty body is an empty object."""
    try:
        value = json.loads(data or b"{}")
    except ValueError as problem:
        raise BadRequestError(f"the body is not JSON: {problem}") from problem
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError("the body is not a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


class Body:
    """A request body as a stream, by length or in chunks; `read` gives fewer bytes only at the end."""

    def __init__(self, stream: Any, length: int | None, chunked: bool) -> None:
        self._stream = stream
        self._chunked = chunked
        self._left = 0 if chunked else (length or 0)
        self._ended = not chunked and self._left == 0

    def read(self, size: int = -1, /) -> bytes:
        """Read up to ``size`` bytes.

        Raises:
            BadRequestError: The connection broke off in the middle.
        """
        pieces: list[bytes] = []
        wanted = sys.maxsize if size < 0 else size
        while wanted and not self._ended:
            if not self._left and not self._next_chunk():
                break
            data = self._stream.read(min(self._left, wanted))
            if not data:
                raise BadRequestError("the body ended early")
            self._left -= len(data)
            wanted -= len(data)
            pieces.append(data)
            if not self._left and not self._chunked:
                self._ended = True
        return b"".join(pieces)

    def _next_chunk(self) -> bool:
        line = self._stream.readline(1024).strip() or self._stream.readline(1024).strip()
        try:
            self._left = int(line.split(b";")[0], 16)
        except ValueError:
            raise BadRequestError("the body ended early, or its chunks are malformed") from None
        if self._left:
            return True
        while self._stream.readline(1024).strip():
            pass
        self._ended = True
        return False

    def finish(self, limit: int) -> bool:
        """Read away what was not used; False when that is more than ``limit`` bytes."""
        while not self._ended and limit > 0:
            limit -= len(self.read(min(limit, 1 << 16)))
        return self._ended


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
        length = self.headers.get("Content-Length")
        chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        body = Body(self.rfile, int(length) if length and length.isdigit() else None, chunked)
        epoch = self._epoch()
        self.site.box.heard(epoch)
        try:
            answer = self._route(route, address.query, body, epoch)
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

    def _epoch(self) -> int | None:
        epoch = self.headers.get(EPOCH_HEADER, "")
        return int(epoch) if epoch.isdigit() else None

    def _route(self, route: Route, query: str, body: Body, epoch: int | None) -> Reply | Iterable[bytes]:
        request_id = self.headers.get(REQUEST_ID_HEADER)
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
        return self.site.replies.once(request_id, lambda: self._tried(route, call))

    def _tried(self, route: Route, call: Call) -> Reply | Iterable[bytes]:
        """A failure is an answer too: a command must not run again because the news of its end was lost."""
        try:
            return route(call)
        except (BadRequestError, ConnectionError):
            raise  # it was not understood, or did not come whole: nothing was begun
        except Exception as problem:
            return self.site.failure(urlsplit(self.path).path, problem)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.body)

    def _stream(self, chunks: Iterable[bytes], epoch: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.site.box.heard(epoch)
        self.wfile.write(b"0\r\n\r\n")
