"""One real sandbox, to see what no question tells: whether it starts, and which ways lead to it."""

from collections.abc import Callable

import msgspec

from sandbox_k8s.client import SandboxClient
from sandbox_k8s.clock import Clock
from sandbox_k8s.errors import DiagnosedError, SandboxError, SandboxStartError
from sandbox_k8s.handle import SandboxHandle
from sandbox_k8s.kubernetes.config import DataPath, KubernetesConfig
from sandbox_k8s.sandbox import Sandbox
from sandbox_k8s.spec import SandboxSpec

from .finding import Finding, advice, broken, works

_PATHS: tuple[DataPath, ...] = ("pod_ip", "api_proxy", "port_forward")
_ANSWER_S = 10.0
_SPEC = SandboxSpec(lease_s=60.0, labels={"for": "doctor"})
_LOOK = 'command -v bash python3 git; echo; [ -r ~/.bashrc ] && echo "~/.bashrc"; true'


async def probe(config: KubernetesConfig, clock: Clock, tell: Callable[[Finding], None]) -> None:
    """Start a sandbox, try each way to it, run something, stop it; each finding is told as it is made."""
    async with SandboxClient.kubernetes(config, clock=clock) as client:
        begun_s = clock.monotonic_s()
        try:
            sandbox = await client.start(_SPEC)
        except SandboxStartError as problem:
            tell(broken("start", _with_evidence(problem)))
            return
        tell(works("start", f"{config.image} in {clock.monotonic_s() - begun_s:.1f} s, pod sbx-{sandbox.id}"))
        for path in _PATHS:
            tell(await _by(path, sandbox.handle, config, clock))
        tell(await _inside(sandbox, clock))
        begun_s = clock.monotonic_s()
        try:
            await sandbox.stop()
        except SandboxError as problem:
            tell(broken("stop", _with_evidence(problem)))
            return
        tell(works("stop", f"its pod was gone after {clock.monotonic_s() - begun_s:.1f} s"))


async def _by(path: DataPath, handle: SandboxHandle, config: KubernetesConfig, clock: Clock) -> Finding:
    """One way to a launcher; one that is closed only matters when no other is to be taken."""
    only = msgspec.structs.replace(config, data_path=path, answer_margin_s=_ANSWER_S)
    try:
        async with SandboxClient.kubernetes(only, clock=clock) as client:
            guest = await client.attach(handle, take_ownership=False)
            begun_s = clock.monotonic_s()
            await guest.execute(["true"], timeout_s=_ANSWER_S)
            return works(path, f"a command takes {(clock.monotonic_s() - begun_s) * 1000:.0f} ms")
    except SandboxError as problem:
        verdict = broken if config.data_path == path else advice
        return verdict(path, f"not from here: {_with_evidence(problem)}")


async def _inside(sandbox: Sandbox, clock: Clock) -> Finding:
    try:
        seen = await sandbox.execute(_LOOK, timeout_s=_ANSWER_S)
        session = await sandbox.session()
        begun_s = clock.monotonic_s()
        await session.run("true", timeout_s=_ANSWER_S)
    except SandboxError as problem:
        return broken("inside", _with_evidence(problem))
    took_ms = (clock.monotonic_s() - begun_s) * 1000
    there = ", ".join(seen.stdout_text.split()) or "no bash: commands are for sh"
    return works("inside", f"a command in a session takes {took_ms:.0f} ms; there are: {there}")


def _with_evidence(problem: SandboxError) -> str:
    """The message with what is known besides: the advice of its class, or else what was seen."""
    details = None
    if isinstance(problem, DiagnosedError) and problem.diagnosis is not None:
        details = problem.diagnosis.details
    return str(problem) if details is None else f"{problem.args[0]}. {details.advice}"
