"""A diagnosis for people, and ``sandbox-k8s explain`` on files: no cluster is asked."""

import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sandbox_k8s.errors import ClusterError, ConfigError

from .classify import classify
from .diagnosis import Diagnosis, Evidence
from .failure import Failure
from .pod_state import read_node, read_pod
from .signs import gist

_WIDTH = 110
# The last cause in what the HTTP library says of a connection that failed.
_SILENCE = (r"\[Errno -?\d+\] ([^'\")]+)", r"(certificate verify failed[^'\"(]*)", r"(timed out)")
_NEXT = {
    "starting": "Wait.",
    "ready": "Nothing.",
    "stopping": "Nothing.",
    "unknown": "Ask for the pod by name and uid: kubectl get pod NAME -o json.",
}


def explain_files(pods: str, events: Path | None, node: Path | None) -> str:
    """Explain the pods in a file (``-`` is standard input), as ``kubectl get pod -o json`` prints them.

    Args:
        pods: One pod or a list of pods.
        events: What ``kubectl get events -o json`` printed; other pods' events do no harm. None: without.
        node: What ``kubectl get node NAME -o json`` printed; None: without.

    Raises:
        ConfigError: A file cannot be read or holds something else; the message names it.
    """
    known = [] if events is None else _items(events)
    nodes = {} if node is None else {read_node(one).metadata.name: one for one in _items(node)}
    hints = () if known else ("--events FILE shows more: kubectl get events -o json",)
    parts: list[str] = []
    for pod in _items(pods):
        read = read_pod(pod)
        name = read.spec.node_name
        of_pod = nodes.get(name) if name else next(iter(nodes.values()), None)
        where = f"{read.metadata.namespace or 'default'}/{read.metadata.name or '?'}"
        parts.append(explanation(f"pod {where}", classify(pod, known, of_pod), hints))
    return "\n".join(parts) if parts else "no pods\n"


def explanation(name: str, diagnosis: Diagnosis, hints: Iterable[str] = ()) -> str:
    """A diagnosis as lines of text.

    Args:
        name: What it is about.
        diagnosis: See `classify`.
        hints: What would make it better; shown unless the pod is fine.
    """
    details = diagnosis.details
    head = diagnosis.state if diagnosis.failure is None else f"{diagnosis.state}: {diagnosis.failure}"
    lines = [f"{name}  {head}{' (a guess)' if diagnosis.guess else ''}"]
    if details is None:
        lines += _row("why", diagnosis.why)
        lines += _row("do", _NEXT[diagnosis.state])
    else:
        lines += _row("what", details.title)
        lines += _row("seen", diagnosis.why)
        lines += _row("fault", _fault(diagnosis, details))
        lines += _row("do", details.advice)
    if diagnosis.guess:
        lines += _row("guess", "These signs are not among those that are known; this is the nearest class.")
    lines += _evidence(diagnosis.evidence)
    if diagnosis.state not in ("ready", "stopping"):
        for hint in hints:
            lines += _row("hint", hint)
    return "\n".join(lines) + "\n"


def in_words(problem: ClusterError) -> str:
    """Why the API server refused something or is silent, without names of classes and libraries."""
    why = str(problem.args[0]) if problem.diagnosis is None else problem.diagnosis.why
    denied = re.search(r'User "(.+?)" cannot (\w+) resource "(.+?)"', why)
    if denied is not None:
        return f'user "{denied[1]}" may not {denied[2]} {denied[3]}'
    if problem.code:
        return why
    for pattern in _SILENCE:
        found = re.search(pattern, why)
        if found is not None:
            return f"the API server does not answer: {found[1].strip()}"
    return f"the API server does not answer: {why}"


def _evidence(evidence: Iterable[Evidence]) -> list[str]:
    """Each source; a text that was shown before is not shown again (status and events repeat each other)."""
    lines: list[str] = []
    shown = ""
    for one in evidence:
        words = gist(one.text)
        text = "the same" if words and words in shown else one.text
        shown += f"{one.text}\n"
        lines += _row("evidence", f"{one.source}: {text}" if text else one.source)
    return lines


def _fault(diagnosis: Diagnosis, details: Failure) -> str:
    if diagnosis.state == "failing":
        then = "Kubernetes keeps trying: this pod may come right"
    elif details.retryable:
        then = "this pod will not recover, a new one may do better"
    else:
        then = "a new pod would end the same way until something is changed"
    return f"{details.fault}; {then}"


def _row(label: str, text: str) -> list[str]:
    # Evidence may hold what a container wrote: no control sequence of it may reach the terminal.
    plain = "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)
    return textwrap.wrap(
        plain or "-",
        _WIDTH,
        initial_indent=f"  {label:10}",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _items(source: str | Path) -> list[dict[str, Any]]:
    """The objects of a file: of a List, or the one that it holds."""
    name = "standard input" if source == "-" else str(source)
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        data = msgspec.json.decode(text, type=dict[str, Any])
    except OSError as problem:
        raise ConfigError(
            f"cannot read {name}: {problem.strerror}; it should hold JSON of kubectl"
        ) from problem
    except msgspec.DecodeError as problem:
        raise ConfigError(f"{name} is not the JSON of an object of Kubernetes: {problem}") from problem
    items: object = data.get("items") if str(data.get("kind", "")).endswith("List") else [data]
    try:
        return msgspec.convert(items, list[dict[str, Any]])
    except msgspec.ValidationError as problem:
        raise ConfigError(f"{name} is not a list of objects of Kubernetes: {problem}") from problem
