"""Answers of the API server that are no success, as a real one gave them."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from sandbox_k8s import ClusterError, Injection, KubernetesConfig
from sandbox_k8s.kubernetes import classify_refusal, says_pod_is_missing
from sandbox_k8s.kubernetes.api import refusal
from sandbox_k8s.kubernetes.starting import until_ready
from sandbox_k8s.kubernetes.watch import FollowedPod
from sandbox_k8s.routes import AddressRoute
from sandbox_k8s.transport import LauncherClient

FOLDER = Path(__file__).parent / "recordings"
REFUSED = {
    "admission-invalid": "spec_invalid",
    "admission-pod-security": "policy_refused",
    "admission-priorityclass-missing": "reference_missing",
    "admission-runtimeclass-missing": "reference_missing",
    "admission-serviceaccount-missing": "reference_missing",
    "limitrange-refusal": "limits_refused",
    "namespace-missing": "namespace_missing",
    "namespace-terminating": "namespace_terminating",
    "quota-exceeded": "quota_exceeded",
    "quota-must-specify": "limits_refused",
    "rbac-bad-token": "credentials_refused",
    "rbac-refusal": "permission_denied",
}


def exchanges(*names: str) -> list[dict[str, Any]]:
    data = json.loads((FOLDER / "answers.json").read_text(encoding="utf-8"))
    return [one for one in data["exchanges"] if one["id"] in names]


def test_every_refusal_of_the_recordings() -> None:
    answers = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))["response"]
        for path in FOLDER.glob("*.json")
        if '"response"' in path.read_text(encoding="utf-8") and path.stem != "answers"
    }
    assert set(answers) == set(REFUSED)
    for cause, answer in answers.items():
        found = classify_refusal(answer["status"], answer["body"], answer["headers"])
        assert (cause, found.failure, found.guess) == (cause, REFUSED[cause], False)
        assert found.state == ("failing" if cause == "quota-exceeded" else "failed")
        assert found.evidence


def test_every_fault_of_an_invalid_pod_is_evidence() -> None:
    answer = json.loads((FOLDER / "admission-invalid.json").read_text(encoding="utf-8"))["response"]
    found = classify_refusal(answer["status"], json.dumps(answer["body"]).encode())
    sources = [one.source for one in found.evidence]
    assert {"cause metadata.name", "cause spec.activeDeadlineSeconds"} <= set(sources)


@pytest.mark.parametrize(
    ("name", "method", "found"),
    [
        ("create-duplicate", "POST", ["name_taken"]),
        # The second one looks like a fault of the server and is the caller's for good.
        ("body-too-large", "POST", ["request_too_large", "request_too_large", "request_too_large"]),
        ("etcd-killed", "POST", ["api_unavailable"]),
        ("unknown-field-strict", "POST", ["spec_invalid"]),
        ("malformed-json", "POST", ["spec_invalid"]),
    ],
)
def test_other_answers_to_a_create(name: str, method: str, found: list[str]) -> None:
    answers = [one["response"] for one in exchanges(name) if one["request"]["method"] == method]
    assert [classify_refusal(one["status"], one["body"]).failure for one in answers] == found


def test_flow_control_answers_in_plain_text_and_says_how_long() -> None:
    answer = exchanges("too-many-requests")[0]["response"]
    assert isinstance(answer["body"], str)
    found = classify_refusal(answer["status"], answer["body"], answer["headers"])
    assert (found.failure, found.state, found.retry_after_s) == ("api_overloaded", "failing", 1.0)


def test_no_answer_at_all_is_no_refusal() -> None:
    found = classify_refusal(0, "connection reset by peer")
    assert (found.failure, found.retryable, found.evidence[0].text) == (
        "api_unavailable",
        True,
        "connection reset by peer",
    )


def test_a_404_is_a_missing_pod_only_as_a_status_about_pods() -> None:
    """A restarted kubelet says 404 of a pod that runs; a program behind the proxy has its own."""
    answers = exchanges("get-missing", "pods-proxy", "exec-refusals", "exec-after-kubelet-restart")
    said = {
        one["request"]["path"].partition("/pods/")[2]: says_pod_is_missing(
            one["response"]["status"], one["response"]["body"]
        )
        for one in answers
        if one["response"]["status"] == 404
    }
    assert said == {
        "none": True,
        "nope/exec": True,
        "nope:80/proxy/": True,
        "web:8000/proxy/none": False,
        "racer/exec": False,
    }
    namespace = json.loads((FOLDER / "namespace-missing.json").read_text(encoding="utf-8"))["response"]
    assert not says_pod_is_missing(404, namespace["body"])
    of_a_program = {"reason": "NotFound", "details": {"kind": "pods", "name": "x"}}
    assert not says_pod_is_missing(404, of_a_program)


def test_an_unknown_refusal_is_a_guess() -> None:
    body = {
        "kind": "Status",
        "status": "Failure",
        "reason": "Forbidden",
        "message": "the moon is wrong",
        "code": 403,
    }
    found = classify_refusal(403, body)
    assert (found.failure, found.guess, found.state) == ("create_refused", True, "failed")
    assert "the moon is wrong" in found.evidence_text
    assert classify_refusal(418).guess


@given(
    st.integers(400, 599),
    st.one_of(st.none(), st.text(), st.binary(), st.dictionaries(st.text(), st.integers())),
)
def test_no_body_is_too_strange(code: int, body: Any) -> None:
    found = classify_refusal(code, body, {"Retry-After": "soon"})
    assert found.failure is not None
    assert found.retry_after_s is None
    assert not says_pod_is_missing(code, body)


FORBIDDEN = {
    "kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
    "message": 'pods "sbx-1" is forbidden: User "u" cannot create resource "pods/proxy" in API group ""',
}  # fmt: skip


async def refusing(request: web.Request) -> web.Response:
    return web.json_response(FORBIDDEN, status=403)


class Address(AddressRoute):
    def __init__(self, url: str) -> None:
        super().__init__("localhost", 1)
        self.base_url = url


@pytest.mark.anyio
async def test_a_way_that_the_api_server_keeps_closed_is_no_lost_sandbox() -> None:
    """It was "answered 403" after 30 s of trying, retryable, and of the sandbox."""
    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", refusing)
    async with TestServer(app) as server:
        launcher = LauncherClient(Address(str(server.make_url("/"))), "t", 1, margin_s=5, where="sandbox s")
        try:
            with anyio.fail_after(5), pytest.raises(ClusterError, match="the way to sandbox s") as failed:
                await launcher.answers(30)
        finally:
            await launcher.close()
    assert failed.value.diagnosis is not None
    assert (failed.value.code, failed.value.diagnosis.failure) == (403, "permission_denied")
    assert failed.value.retryable is False


@pytest.mark.anyio
async def test_who_waits_for_a_pod_hears_that_nobody_may_watch() -> None:
    followed = FollowedPod("sbx-1")
    config = KubernetesConfig(injection=Injection(kind="baked"))
    said: list[str] = []

    async def wait() -> None:
        with pytest.raises(ClusterError) as failed:
            await until_ready(followed, config, lambda found: None)
        said.append(str(failed.value))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            followed.refuse(refusal("watching pods", 403, json.dumps(FORBIDDEN)))
    assert "permission_denied" in said[0]
    followed.see({"metadata": {"name": "sbx-1"}})
    assert followed.refused is None
