"""The words of runtimes and registries, and what must not be read into them."""

import json
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s.kubernetes import Diagnosis, classify

FOLDER = Path(__file__).parent / "recordings"


def stage(cause: str, number: int = -1) -> dict[str, Any]:
    return json.loads((FOLDER / f"{cause}.json").read_text(encoding="utf-8"))["stages"][number]


def changed(data: dict[str, Any], *pairs: tuple[str, str]) -> dict[str, Any]:
    text = json.dumps(data)
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return json.loads(text)


def diagnose(seen: dict[str, Any]) -> Diagnosis:
    return classify(seen["pod"], seen["events"], seen["node"])


def main_status(seen: dict[str, Any]) -> dict[str, Any]:
    return seen["pod"]["status"]["containerStatuses"][0]


RUNC = "failed to create containerd task: OCI runtime create failed: runc create failed: "


@pytest.mark.parametrize(
    ("message", "failure", "guess"),
    [
        (
            RUNC + 'unable to start container process: exec: "/sbx/run": exec format error',
            "image_architecture",
            False,
        ),
        (RUNC + 'exec: "swe": executable file not found in $PATH: unknown', "command_not_found", False),
        (RUNC + 'exec: "/sbx/run": permission denied: unknown', "command_not_executable", False),
        (RUNC + "container init was OOM-killed (memory limit too low?)", "oom_at_start", False),
        (RUNC + 'error mounting "/a" to rootfs at "/b": not a directory: unknown', "start_failed", True),
    ],
)
def test_why_a_process_was_not_started(message: str, failure: str, guess: bool) -> None:
    seen = stage("start-error-never")
    seen["events"] = []
    main_status(seen)["state"]["terminated"]["message"] = message
    assert (diagnose(seen).failure, diagnose(seen).guess) == (failure, guess)


@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_exec_format_error_is_found_in_the_last_words_of_a_container(kind: str) -> None:
    """A runtime that has handed over cannot report it: the shell or loader in the container does."""
    seen = stage("init-fails-never") if kind.startswith("init") else stage("exit-at-once-never")
    end = seen["pod"]["status"][kind][0]["state"]["terminated"]
    end.update(exitCode=255, message="exec /opt/tools/bin/python: exec format error\n")
    found = diagnose(seen)
    assert (found.failure, found.fault, found.retryable) == ("image_architecture", "image", False)


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        # An index without the node's platform ends in ": not found" and is no missing tag.
        (
            'failed to pull and unpack image "a/b:1": no match for platform in manifest: not found',
            "image_architecture",
        ),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", "image_architecture"),
        # A token server that is down is no missing permission.
        (
            "failed to authorize: failed to fetch anonymous token: unexpected status from GET request to "
            "https://auth.example.com/token: 503 Service Unavailable",
            "image_registry_error",
        ),
        (
            'failed to authorize: failed to fetch oauth token: Post "https://auth.example.com/token": '
            "dial tcp 192.0.2.7:443: i/o timeout",
            "image_registry_unreachable",
        ),
        ('Head "https://r.example.com/v2/": net/http: TLS handshake timeout', "image_registry_unreachable"),
        (
            'Get "https://r.example.com/v2/": http: server gave HTTP response to HTTPS client',
            "image_registry_tls",
        ),
        ("toomanyrequests: You have reached your unauthenticated pull rate limit.", "image_rate_limit"),
        ("write /var/lib/containerd/tmp/x: no space left on device", "node_disk_full"),
        (
            "reading manifest 1 in docker.io/library/nope: requested access to the resource is denied",
            "image_auth",
        ),
        ("manifest for example.com/a:2 not found: manifest unknown: manifest unknown", "image_not_found"),
        ("failed commit on ref: unexpected commit digest sha256:aa, expected sha256:bb", "image_pull_cut"),
    ],
)
def test_why_an_image_cannot_be_pulled(message: str, failure: str) -> None:
    seen = stage("image-not-found", 3)
    seen["events"] = []
    main_status(seen)["state"]["waiting"]["message"] = message
    found = diagnose(seen)
    assert (found.failure, found.guess) == (failure, False)


@pytest.mark.parametrize(
    "name", ["unauthorized", "not-found", "rate-limit", "no-such-host", "access-denied/tls"]
)
@pytest.mark.parametrize(
    ("cause", "repository"),
    [
        ("image-not-found", "registry.example.com/notfound/app"),
        ("image-registry-503", "registry.example.com/err503/app"),
        ("image-auth-401", "registry.example.com/auth401/app"),
        ("image-layer-cut", "registry.example.com/cut/app"),
    ],
)
def test_the_name_of_an_image_is_not_why_it_fails(name: str, cause: str, repository: str) -> None:
    seen = stage(cause)
    misleading = changed(seen, (repository, f"registry.example.com/{name}"))
    assert diagnose(misleading).failure == diagnose(seen).failure


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_launcher_tree_that_is_not_there_is_called_that(number: int) -> None:
    """Otherwise the error is about a loader that nobody asked for."""
    seen = stage("start-error-never", number)
    found = diagnose(changed(seen, ("/no/such/program", "/opt/sandbox-k8s/lib/ld.so")))
    assert found.failure == "command_not_found"
    assert "no tree of `sandbox-k8s build-tools` at /opt/sandbox-k8s: " in found.why
    assert "build-tools" not in diagnose(seen).why


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_launcher_tree_that_may_not_be_executed_is_called_that(number: int) -> None:
    """kubernetes/enhancements#5354, kubernetes/kubernetes#135775: image volumes were mounted noexec."""
    seen = stage("start-error-permission", number)
    found = diagnose(changed(seen, ('exec: \\"/bin\\"', 'exec: \\"/opt/sandbox-k8s/lib/ld.so\\"')))
    assert found.failure == "command_not_executable"
    assert "what is at /opt/sandbox-k8s may not be executed: " in found.why
    assert "init_copy" in found.why
    assert "init_copy" not in diagnose(seen).why


def test_a_back_off_that_does_not_say_why_is_explained_by_its_event() -> None:
    """Kubelets before 1.31 wait with the reason ImagePullBackOff and no cause."""
    seen = stage("image-not-found")
    main_status(seen)["state"]["waiting"]["message"] = 'Back-off pulling image "x"'
    assert (diagnose(seen).failure, diagnose(seen).guess) == ("image_not_found", False)
    seen["events"] = []
    assert (diagnose(seen).failure, diagnose(seen).guess) == ("image_pull_failed", True)
