"""Credentials that are read by programs, run out, or are replaced; read in threads alone."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from sandbox_k8s import ClientStats, ClusterError, Injection, KubernetesConfig
from sandbox_k8s.kubernetes.access import ApiAccess

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
urllib3 = pytest.importorskip("urllib3")
Make = Callable[[dict[str, object]], ApiAccess]
ENDED = "2020-01-01T00:00:00Z"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Credentials of a kubeconfig (JSON is YAML) with that user."""

    def write(user: dict[str, object]) -> ApiAccess:
        written(tmp_path, user)
        return ApiAccess(
            KubernetesConfig(injection=Injection(kind="baked"), kubeconfig=tmp_path / "kubeconfig")
        )

    return write


def written(folder: Path, user: dict[str, object]) -> None:
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": [context],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": user}],
    }  # fmt: skip
    (folder / "kubeconfig").write_text(json.dumps(config))


def program(folder: Path, script: str) -> dict[str, object]:
    """A user whose token a shell script prints; it has run out at once."""
    said = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    said |= {"status": {"token": "TOKEN", "expirationTimestamp": ENDED}}
    file = folder / "credentials"
    quoted = json.dumps(said).replace("TOKEN", "'$token'")
    file.write_text(f"#!/bin/sh\n{script}\necho '{quoted}'\n")
    file.chmod(0o755)
    return {"exec": {"apiVersion": said["apiVersion"], "command": str(file), "interactiveMode": "Never"}}


def token(options: dict[str, dict[str, str]]) -> str:
    return options["headers"]["authorization"].removeprefix("Bearer ")


def test_only_one_thread_waits_for_a_program_and_the_loop_never_does(make: Make, tmp_path: Path) -> None:
    """Each watch and each request through the API server ran it in the loop: heartbeats stopped meanwhile."""
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    os.mkfifo(gate)
    script = f"echo run >>{runs}\ntoken=$(wc -l <{runs} | tr -d ' ')\n[ $token -lt 3 ] || cat <{gate}"
    access = make(program(tmp_path, script))
    assert token(access.known_options()) == "2", "the library ran it, and then it had run out"
    got: list[str] = []
    reading = threading.Thread(target=lambda: got.append(token(access.options())))
    reading.start()
    with gate.open("w"):  # opened as soon as the program reads, and not closed yet
        assert token(access.options()) == "2", "the last one, while the other thread is at it"
        assert token(access.known_options()) == "2"
    reading.join(20)
    assert got == ["3"]
    assert token(access.known_options()) == "3"
    assert runs.read_text().count("run") == 3


def test_what_is_handed_out_may_be_changed(make: Make) -> None:
    access = make({"token": "first"})
    access.known_options().pop("headers")
    access.known_options()["headers"].clear()
    assert token(access.known_options()) == "first"


def test_a_token_that_was_replaced_is_found_once_it_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = make({"token": "first"})
    written(tmp_path, {"token": "second"})
    assert token(access.options()) == "first"
    assert access.renew()
    assert token(access.known_options()) == "second"
    written(tmp_path, {"token": "third"})
    assert access.renew(), "another thread may have just done it"
    assert token(access.options()) == "second"
    monkeypatch.setattr("sandbox_k8s.kubernetes.access._RENEW_EVERY_S", 0.0)
    (tmp_path / "kubeconfig").write_text("")
    assert not access.renew()
    assert token(access.options()) == "second"


@pytest.mark.anyio
async def test_credentials_that_cannot_be_read_are_counted_and_the_last_are_used_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An identity provider that is away raises what no list of errors has; it ended the client."""
    monkeypatch.setattr("sandbox_k8s.kubernetes.access._READ_EVERY_S", 0.01)
    access, stats, tries = make({"token": "first"}), ClientStats(), anyio.Event()
    portal = anyio.from_thread.BlockingPortal()

    def away(_: object) -> None:
        if stats.credential_failures == 3 and not tries.is_set():
            portal.start_task_soon(tries.set)
        raise urllib3.exceptions.MaxRetryError(None, "https://idp.example.com")

    access._configuration.refresh_api_key_hook = away
    with anyio.fail_after(10):
        async with portal, anyio.create_task_group() as tasks:
            tasks.start_soon(access.keep_fresh, stats)
            await tries.wait()
            tasks.cancel_scope.cancel()
    assert stats.credential_failures >= 3
    assert caplog.text.count("those that were read last are used on") == 1
    assert token(access.known_options()) == "first"
    with access._reading:
        """The read that was cancelled may be under way in its thread, and nobody waits for another's."""
    with pytest.raises(ClusterError, match="reading the credentials: MaxRetryError"):
        access.options()
