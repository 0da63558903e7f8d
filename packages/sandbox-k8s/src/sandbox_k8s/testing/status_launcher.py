"""The launcher of a pod without a process: it answers what needs none, and says so of the rest.

Who owns the sandbox, when its lease is over and what its log says is the real launcher's own `Ownership`,
asked in the same order. As nothing runs here, a fence has nothing to end.
"""

import asyncio
import hashlib
import hmac
import json
from typing import Any

from aiohttp import web

from sandbox_k8s.launcher.body import BadRequestError
from sandbox_k8s.launcher.ownership import FencedError, LeaseOverError, NotOwnerError, Ownership
from sandbox_k8s.launcher.routes import VERSION, failure
from sandbox_k8s.launcher.web import EPOCH_HEADER, KEY_HEADER, epoch_of

from .store import Object

_NO_PROCESS = "sandbox_k8s.testing: a pod of the kind 'status' has no process; use pods of kind 'process'"


class StatusLauncher:
    """One launcher.

    Args:
        token_hash: Hex SHA-256 of the key that callers must show.
        lease_s: As the pod's command says.
    """

    def __init__(self, token_hash: str, lease_s: float) -> None:
        self._token_hash = token_hash
        self._ownership = Ownership(lease_s, _now_s())

    @classmethod
    def of(cls, pod: Object) -> "StatusLauncher | None":
        """The launcher that a pod's command starts; None when the command is another one."""
        words: list[str] = pod["spec"]["containers"][0].get("command") or []
        if "--token-hash" not in words or "--lease" not in words:
            return None
        return cls(words[words.index("--token-hash") + 1], float(words[words.index("--lease") + 1]))

    @property
    def ended(self) -> bool:
        """Whether its lease has run out: then nobody listens any more."""
        return self._ownership.over(_now_s())

    async def answer(self, request: web.Request, path: str) -> web.StreamResponse:
        """Answer a request; the key is checked before anything else."""
        key = request.headers.get(KEY_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self._token_hash):
            return web.json_response({"error": "auth", "message": "Invalid API Key"}, status=401)
        body: dict[str, Any] = json.loads(await request.read() or b"{}")
        try:
            epoch = epoch_of(request.headers.get(EPOCH_HEADER))
            self._ownership.heard(epoch, _now_s())
            answer = self._answer((request.method, path), epoch, body | dict(request.query))
        except (FencedError, NotOwnerError, LeaseOverError, BadRequestError, KeyError) as problem:
            reply = failure(problem)
            return web.Response(body=reply.body, status=reply.status, content_type=reply.content_type)
        if answer is None:
            return web.json_response({"error": "launcher", "message": _NO_PROCESS}, status=500)
        return web.json_response(answer)

    def _answer(
        self, asked: tuple[str, str], epoch: int | None, body: dict[str, Any]
    ) -> dict[str, Any] | None:
        owner, now_s = self._ownership, _now_s()
        if asked == ("GET", "/is_alive"):
            return {"is_alive": True, "message": ""}
        if asked == ("GET", "/sbx/info"):
            shown = {"version": VERSION, "pid": 1, "epoch": owner.epoch, "lease_left_s": owner.left_s(now_s)}
            return shown | {"shell": "", "sessions": {}, "running": 0}
        if asked == ("GET", "/sbx/log"):
            return {"now_s": now_s, "entries": owner.log.after(int(body.get("after", "0")))}
        if asked == ("POST", "/sbx/fence"):
            number, _ = owner.fence(body["epoch"], now_s)
            owner.fenced(number, body["epoch"], now_s)
            return {"epoch": owner.epoch}
        if asked == ("POST", "/sbx/lease"):
            if "lease_s" in body:
                owner.change_lease(epoch, body["lease_s"], now_s)
            else:
                owner.must_own(epoch, now_s)
            return {"epoch": owner.epoch, "lease_left_s": owner.left_s(now_s)}
        return None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
