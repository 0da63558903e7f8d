"""One watch over the pods of a run and one over events, for everybody who waits for something."""

import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from sandbox_k8s.errors import ClusterError
from sandbox_k8s.stats import ClientStats
from sandbox_k8s.supervise import supervised

from . import records
from .api import PodApi, PodMissingError, refusal
from .config import KubernetesConfig
from .streams import ApiStreams

_log = logging.getLogger("sandbox_k8s")
_MOST_EVENTS = 64
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_GONE = 410
_REFUSED = (401, 403)
_TOO_SHORT_S = 0.5
_SURE_S = 2.0
_PER_TURN = 8
"""Changes taken per turn of the event loop: each wakes somebody up, who has much to do."""


class FollowedPod:
    """The newest that is known of one pod.

    It is kept as bytes: a thousand pods as dicts are objects by the hundred thousand, and each full garbage
    collection then stops the event loop for a tenth of a second.

    Attributes:
        gone: The API server has no such pod any more; ``pod`` is its last state.
        refused: Why nothing will be seen of it: this client may not list or watch pods. None once it was
            seen after all.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.gone = False
        self.refused: ClusterError | None = None
        self._pod: bytes | None = None
        self._events: dict[str, bytes] = {}
        self._changed: anyio.Event | None = None

    @property
    def pod(self) -> dict[str, Any] | None:
        """JSON of the pod, read anew each time; None before it was created or seen."""
        return None if self._pod is None else msgspec.json.decode(self._pod)

    @property
    def seen(self) -> bool:
        """Whether the pod was created or seen."""
        return self._pod is not None

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events about pods of this name, the oldest first."""
        return [msgspec.json.decode(event) for event in self._events.values()]

    @property
    def changed(self) -> anyio.Event:
        """Set at the next change. Get it before looking, so that no change is missed."""
        if self._changed is None:
            self._changed = anyio.Event()
        return self._changed

    def created(self, pod: dict[str, Any]) -> None:
        """Take the answer of a create or a GET, unless the watch was quicker and knows more."""
        if not self.seen:
            self.see(pod)

    def see(self, pod: dict[str, Any], *, gone: bool = False) -> None:
        """Take a newer state."""
        self._pod, self.gone, self.refused = msgspec.json.encode(pod), gone, None
        self._tell()

    def refuse(self, problem: ClusterError) -> None:
        """Wake those up who wait for what will not come."""
        self.refused = problem
        self._tell()

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event; its repetitions replace it, the oldest make room."""
        self._events[event["metadata"]["uid"]] = msgspec.json.encode(event)
        if len(self._events) > _MOST_EVENTS:
            del self._events[next(iter(self._events))]
        self._tell()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class _Trouble:
    """What went wrong with one watch since it last worked."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._refused_s: float | None = None
        self._expired = False

    @property
    def begins(self) -> bool:
        """Whether nothing had to wait yet."""
        return self._pause_s == _FIRST_PAUSE_S

    def expires_again(self) -> bool:
        """Its version expired; True when that of a list made for the same reason did, too."""
        again, self._expired = self._expired, True
        return again

    def is_refused(self, code: int) -> bool:
        """Whether it is refused for good, after an answer with that code.

        A token that is being renewed, or an API server whose authorizer is just coming up, is refused for a
        moment.
        """
        if code not in _REFUSED:
            self._refused_s = None
            return False
        now_s = anyio.current_time()
        if self._refused_s is None:
            self._refused_s = now_s
        return now_s - self._refused_s >= _SURE_S

    async def wait(self) -> None:
        """Wait, each time longer."""
        await anyio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class PodWatch:
    """Follows pods by name. Costs two connections however many they are, none before the first.

    What nobody follows is not kept.
    """

    def __init__(
        self, api: PodApi, streams: ApiStreams, config: KubernetesConfig, stats: ClientStats
    ) -> None:
        self._api = api
        self._streams = streams
        self._selector = records.selector(config.run)
        self._path = f"api/v1/namespaces/{config.namespace}"
        self._lasts_s = config.watch_s
        self._stats = stats
        self._followed: dict[str, FollowedPod] = {}
        self._wanted = anyio.Event()

    def follow(self, name: str) -> FollowedPod:
        """Begin to follow a pod, before it is created."""
        self._wanted.set()
        return self._followed.setdefault(name, FollowedPod(name))

    def unfollow(self, name: str) -> None:
        """Forget a pod."""
        self._followed.pop(name, None)

    def find(self, name: str) -> FollowedPod | None:
        """A pod that is followed."""
        return self._followed.get(name)

    async def run(self) -> None:
        """Watch, until cancelled."""
        await self._wanted.wait()
        async with anyio.create_task_group() as tasks:
            pods = partial(self._follow, tasks, "pods", self._list_pods, self._take_pod)
            events = partial(self._follow, tasks, "events", self._list_events, self._take_event)
            # Begun anew, each lists: whatever one object could not be read as is left behind.
            tasks.start_soon(supervised, "the watch of pods", pods, self._stats)
            tasks.start_soon(supervised, "the watch of events", events, self._stats)

    async def _follow(
        self,
        tasks: anyio.abc.TaskGroup,
        kind: str,
        list_all: Callable[[anyio.abc.TaskGroup], Coroutine[Any, Any, str]],
        take: Callable[[anyio.abc.TaskGroup, dict[str, Any]], None],
    ) -> None:
        """List, then watch from there; watch again from the last version; list again when it has expired."""
        version = ""
        trouble = _Trouble()
        while True:
            try:
                if not version:
                    self._stats.lists += 1
                    version = await list_all(tasks)
                self._stats.watches += 1
                begun_s, before = anyio.current_time(), version
                version = await self._watch_from(version, kind, tasks, take)
                lasted = anyio.current_time() - begun_s >= _TOO_SHORT_S
                if lasted or version != before:
                    trouble = _Trouble()
                if not lasted:
                    await trouble.wait()
            except ClusterError as problem:
                if problem.code == _GONE:
                    version = ""
                    if not trouble.expires_again():
                        continue
                await self._failed(kind, problem, trouble)

    async def _failed(self, kind: str, problem: ClusterError, trouble: _Trouble) -> None:
        self._stats.watch_failures += 1
        refused = trouble.is_refused(problem.code)
        if refused and kind == "pods":
            for followed in self._followed.values():
                followed.refuse(problem)
        if trouble.begins:
            _log.warning("%s; trying again until it works", problem)
        await trouble.wait()

    async def _watch_from(
        self,
        version: str,
        kind: str,
        tasks: anyio.abc.TaskGroup,
        take: Callable[[anyio.abc.TaskGroup, dict[str, Any]], None],
    ) -> str:
        """Take what one watch brings; the version to go on from."""
        query = {"resourceVersion": version}
        query |= _EVENTS_OF_PODS if kind == "events" else {"labelSelector": self._selector}
        async with aclosing(self._streams.watch(f"{self._path}/{kind}", query, self._lasts_s)) as changes:
            taken = 0
            async for change in changes:
                taken += 1
                if taken % _PER_TURN == 0:
                    await anyio.lowlevel.checkpoint()
                if change["type"] == "ERROR":
                    # 410: the version is too old, or the API server was restarted and has forgotten it.
                    said: dict[str, Any] = change["object"]
                    raise refusal(f"watching {kind}", said.get("code", 0), json.dumps(said))
                version = change["object"]["metadata"]["resourceVersion"]
                if change["type"] != "BOOKMARK":
                    take(tasks, change)
        return version

    async def _list_pods(self, tasks: anyio.abc.TaskGroup) -> str:
        # Those that are missing below must have been there before the list was asked for.
        before = [one for one in self._followed.values() if one.seen and not one.gone]
        there: set[str] = set()
        version = ""
        async with aclosing(self._api.pages(self._selector)) as pages:
            async for page in pages:
                version = page.resource_version
                if page.begins:
                    there.clear()
                await self._take_page(page.items, there)
        for followed in before:
            if followed.name not in there:
                self._ask_for(tasks, followed)
        return version

    async def _take_page(self, pods: Sequence[dict[str, Any]], there: set[str]) -> None:
        for number, pod in enumerate(pods, 1):
            there.add(pod["metadata"]["name"])
            followed = self._followed.get(pod["metadata"]["name"])
            if followed is not None:
                followed.see(pod)
            if number % _PER_TURN == 0:
                await anyio.lowlevel.checkpoint()

    async def _list_events(self, tasks: anyio.abc.TaskGroup) -> str:
        """Where events begin: those of pods that are not followed yet are of no use."""
        return await self._api.events_version()

    def _take_pod(self, tasks: anyio.abc.TaskGroup, change: Mapping[str, Any]) -> None:
        pod: dict[str, Any] = change["object"]
        followed = self._followed.get(pod["metadata"]["name"])
        if followed is None:
            return
        if change["type"] != "DELETED":
            followed.see(pod)
        elif "deletionTimestamp" in pod["metadata"]:
            followed.see(pod, gone=True)
        else:
            # It left the selector: somebody changed its labels. Or it was deleted with no grace at all.
            self._ask_for(tasks, followed)

    def _take_event(self, tasks: anyio.abc.TaskGroup, change: Mapping[str, Any]) -> None:
        event: dict[str, Any] = change["object"]
        # Anybody may write an event about an object without a name.
        followed = self._followed.get(event.get("involvedObject", {}).get("name", ""))
        if followed is not None and change["type"] != "DELETED":
            followed.hear(event)

    def _ask_for(self, tasks: anyio.abc.TaskGroup, followed: FollowedPod) -> None:
        ask = partial(self._make_sure, followed)
        tasks.start_soon(supervised, f"asking for pod {followed.name}", ask, self._stats)

    async def _make_sure(self, followed: FollowedPod) -> None:
        """Ask for a pod that the watch does not show any more."""
        last = followed.pod
        if last is None or self._followed.get(followed.name) is not followed:
            return
        try:
            found = await self._api.get(followed.name)
        except PodMissingError:
            followed.see(last, gone=True)
            return
        except ClusterError as problem:
            _log.warning("%s; the next list tells", problem)
            return
        if found["metadata"]["uid"] == last["metadata"]["uid"]:
            followed.see(found)
        else:
            followed.see(last, gone=True)


_EVENTS_OF_PODS = {"fieldSelector": "involvedObject.kind=Pod"}
