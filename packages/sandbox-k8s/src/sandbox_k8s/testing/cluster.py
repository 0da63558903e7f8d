"""The fake cluster: an API server and a kubelet in a thread of their own, reached over HTTP."""

import re
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web

from sandbox_k8s import bubblewrap
from sandbox_k8s.checks import check_fields
from sandbox_k8s.clock import Clock, SystemClock
from sandbox_k8s.errors import BackendUnavailableError
from sandbox_k8s.local import PYTHON_PREFIX

from . import courses
from .answers import RefusalError
from .background import Background
from .doors import Doors
from .fault_proxy import Upstream
from .kubeconfig import kubeconfig
from .kubelet import KIND_LABEL, Kubelet, Runner
from .listening import listening
from .nodes import DEFAULT_ALLOCATABLE, Nodes
from .objects import Objects, Target
from .placed import Placed, process_of
from .ports import PROXY_SESSION
from .process_pod import ProcessPod
from .server import ApiServer
from .status_pod import StatusPod
from .store import Object, Store, labels_of
from .tree import host_tree

_PODS_WITH_PROCESS = 254
_HEALTHY = "healthy"
_DISK_FULL = "Pod ephemeral local storage usage exceeds the total limit of containers 2Mi. "
_WORD = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_WORD}(?:/{_WORD})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    "(?:@sha256:[0-9a-f]{64})?"
)
PodKind = Literal["process", "status"]


class FakeClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a fake cluster is like.

    Attributes:
        pods: What pods are when their label ``sim.kind`` says nothing: ``status``, which have no process and
            whose status goes the way of a recording, or ``process``, whose command runs in bubblewrap.
        speed: How many recorded seconds pass in one, for the simulated delays; a pod's own grace and deadline
            are real seconds, if it has a process.
        namespaces: Namespaces that exist.
        nodes: Nodes that exist.
        allocatable: What each node has.
        images: Folders of this machine by image name, for pods with a process: the content of an image
            volume, and what a container of that image sees at ``/sandbox-k8s``. Other images are those of
            a launcher tree with this machine's Python. A container's programs are always this machine's.
    """

    pods: PodKind = "status"
    speed: float = 1.0
    namespaces: tuple[str, ...] = ("default", "kube-system")
    nodes: tuple[str, ...] = ("node-1",)
    allocatable: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_ALLOCATABLE))
    images: Mapping[str, Path] = {}

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        check_fields(self)


class FakeCluster:
    """A cluster for tests: pods, events, nodes and namespaces of the core API.

    Use it as a context manager. Its methods may be called from any thread::

        with FakeCluster(FakeClusterConfig(pods="process")) as cluster:
            subprocess.run(["kubectl", "--kubeconfig", cluster.kubeconfig, "get", "pods"])

    Attributes:
        url: Of the API server; ``http://127.0.0.1:PORT``.
        kubeconfig: A file that leads clients to it.

    Raises:
        BackendUnavailableError: Pods are to have a process, and bubblewrap does not work here.
    """

    def __init__(self, config: FakeClusterConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or FakeClusterConfig()
        self._clock = clock or SystemClock()
        self._background = Background("fake-cluster")
        self._addresses: set[str] = set()
        self._made = self._last = 0

    def __enter__(self) -> "FakeCluster":
        if self.config.pods == "process" and (why := why_no_process_pods()):
            raise BackendUnavailableError(why)
        self.folder = Path(tempfile.mkdtemp(prefix="fake-k8s-")).resolve()
        self.kubeconfig = self.folder / "kubeconfig"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.token = self._clock.new_id()
        self.kubeconfig.write_text(kubeconfig(self.url, self.token))
        self._background.start(self._served)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._kubelet.failures and problem is None:
            raise self._kubelet.failures[0]

    @property
    def upstream(self) -> Upstream:
        """For a `FaultProxy` in front of it."""
        return Upstream(self.url, {"Authorization": f"Bearer {self.token}"})

    @property
    def requests(self) -> dict[str, int]:
        """How many requests came, by method and what they named (``GET pods``, ``WATCH events``)."""
        return dict(self._server.requests)

    def pods(self, namespace: str | None = None) -> list[Object]:
        """The pods that exist; of all namespaces if that is None."""
        return self._background.do(lambda: self._store.all("pods", namespace))

    def pod(self, name: str, namespace: str = "default") -> Object:
        """A pod.

        Raises:
            RefusalError: There is none.
        """
        return self._background.do(lambda: self._objects.get(Target("pods", namespace, name)))

    def doom(self, cause: str, pod: str = "*") -> None:
        """Let the next pod, or the next one of that name, suffer a recorded cause (see `causes`).

        Raises:
            ValueError: There is no such recording.
        """
        known = courses.ALIASES.get(cause, cause)
        if known not in self._courses:
            raise ValueError(f"no recording of {cause!r}; there are: {', '.join(sorted(self._courses))}")
        self._background.do(lambda: self._kubelet.doomed.setdefault(pod, []).append(known))

    def causes(self) -> list[str]:
        """Names for `doom` and for the label ``sim.fault``."""
        return sorted({*self._courses, *courses.ALIASES})

    def kill_pod(self, name: str, reason: str = "OOMKilled", namespace: str = "default") -> None:
        """Kill a pod's process as the kernel (``OOMKilled``) or the kubelet (``Evicted``) does."""

        def kill() -> None:
            pod = self._objects.get(Target("pods", namespace, name))
            process = process_of(self._kubelet.runner(pod["metadata"]["uid"]))
            if process is None:
                raise ValueError(f"pod {name} has no process; use doom() before it is created")
            if reason == "Evicted":
                self._kubelet.event(pod, "Evicted", _DISK_FULL, warning=True)
            process.fail(reason)

        self._background.do(kill)

    def evict(self, name: str, namespace: str = "default") -> None:
        """What a drain does to a pod."""
        self._background.do(lambda: self._objects.evict(Target("pods", namespace, name, "eviction"), {}, {}))

    def lose_node(self, name: str = "node-1") -> None:
        """A node's kubelet falls silent. Processes live on; 20 s later, by ``speed``, it is given up."""
        self._background.do(lambda: self._kubelet.lose_node(name))

    def find_node(self, name: str = "node-1") -> None:
        """The kubelet is back."""
        self._background.do(lambda: self._kubelet.find_node(name))

    def cordon(self, name: str = "node-1", *, back: bool = False) -> None:
        """A node takes no new pods, or takes them again."""
        self._background.do(lambda: self._kubelet.nodes.cordon(name, back=back))

    def add_node(self, name: str) -> None:
        """One more node."""
        self._background.do(lambda: self._kubelet.nodes.add(name))

    def restart_api_server(self) -> None:
        """Connections break in mid answer, and every version but the newest is too old for a watch."""

        def restart() -> None:
            self._store.forget()
            self._server.cut()

        self._background.do(restart)

    def refuse_creates(self, *refusals: RefusalError) -> None:
        """Answer the next creates of pods with these, one each."""
        self._background.do(lambda: self._objects.refusals.extend(refusals))

    def forbid(self, verb: str, resource: str) -> None:
        """Refuse requests as RBAC does, for example ``("patch", "pods")`` or ``("create", "pods/proxy")``."""
        self._background.do(lambda: self._server.rights.forbidden.add((verb, resource)))

    def skew_clock(self, seconds: float) -> None:
        """Set the cluster's clock off from this machine's; positive is ahead."""
        self._background.do(lambda: setattr(self._store, "skew_s", seconds))

    @asynccontextmanager
    async def _served(self) -> AsyncGenerator[None]:
        self._store = Store(self._clock)
        self._objects = Objects(self._store)
        self._courses = courses.load()
        nodes = Nodes(self._store)
        self._kubelet = Kubelet(self._store, nodes, self._courses, self.config.speed, self._runner_of)
        for namespace in self.config.namespaces:
            self._objects.create(Target("namespaces", "", ""), {}, {"metadata": {"name": namespace}})
        for node in self.config.nodes:
            nodes.add(node, self.config.allocatable)
        self._server = ApiServer(self._objects, self.token, Doors(self._kubelet).streams())
        app = web.Application(client_max_size=1 << 40)
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=["User-Agent"]
        )
        app[PROXY_SESSION] = session
        async with listening(app, self._server.handle, self._listener):
            try:
                yield
            finally:
                await self._kubelet.close()
                await session.close()
                self._server.cut()

    def _runner_of(self, kubelet: Kubelet, pod: Object) -> Runner:
        cause = kubelet.cause_of(pod)
        kind = labels_of(pod).get(KIND_LABEL, self.config.pods)
        if not cause and not _REFERENCE.fullmatch(pod["spec"]["containers"][0]["image"]):
            cause = "image-name-invalid"
        if cause or kind != "process":
            self._made += 1
            address = f"10.244.{self._made // 250 % 250}.{self._made % 250 + 1}"
            status_pod = StatusPod(kubelet, pod, self._courses[cause or _HEALTHY], address)
            return status_pod if cause else Placed(kubelet, pod, lambda: status_pod)
        address = self._own_address()
        root = self.folder / pod["metadata"]["uid"]
        return Placed(
            kubelet,
            pod,
            lambda: ProcessPod(kubelet, pod, root=root, images=self._images(), address=address),
            lambda: self._addresses.discard(address),
        )

    def _own_address(self) -> str:
        """An address of loopback that no other cluster of this machine gives: it holds our port's number."""
        for _ in range(_PODS_WITH_PROCESS):
            # One that was just given back may not be free yet: connections to it linger.
            self._last = self._last % _PODS_WITH_PROCESS + 1
            address = f"127.{self._port >> 8}.{self._port & 255}.{self._last}"
            if address not in self._addresses:
                self._addresses.add(address)
                return address
        raise RuntimeError(f"a fake cluster has at most {_PODS_WITH_PROCESS} pods with a process")

    def _images(self) -> dict[str, Path]:
        tree = self.folder / "tree"
        if not tree.exists():
            host_tree(tree)
        return {"": tree, **self.config.images}


def why_no_process_pods() -> str:
    """Why pods with a process cannot be had here; empty when they can."""
    for program in ("nsenter", "bwrap"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return bubblewrap.why_unusable(PYTHON_PREFIX)
