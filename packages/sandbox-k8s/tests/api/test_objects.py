"""Objects: what is answered, and with which words. Runs on the fake and on a real cluster."""

import asyncio
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.anyio
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def refused(answer: Any, code: int, reason: str, message: str) -> Any:
    """Check a refusal; its details."""
    assert (answer.status, answer.body["code"]) == (code, code)
    assert answer.body["kind"] == "Status"
    assert answer.body["status"] == "Failure"
    assert answer.body.get("reason", "") == reason
    assert message in answer.body["message"]
    return answer.body.get("details")


async def test_a_new_pod_gets_what_only_the_server_gives(wire: Any, make_pod: Any) -> None:
    made = await wire.create("a1", labels={"app": "x"})
    metadata = made["metadata"]
    assert (metadata["namespace"], metadata["generation"]) == (wire.namespace, 1)
    assert len(metadata["uid"]) == 36
    assert int(metadata["resourceVersion"]) > 0
    assert metadata["creationTimestamp"].endswith("Z")
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Always", 30)
    assert spec["containers"][0]["imagePullPolicy"] == "IfNotPresent"
    details = refused(
        await wire("POST", "pods", make_pod("a1")), 409, "AlreadyExists", 'pods "a1" already exists'
    )
    assert details == {"name": "a1", "kind": "pods"}


async def test_limits_make_requests_and_quality(wire: Any) -> None:
    resources = {"limits": {"cpu": "100m", "memory": "16Mi"}}
    spec = {
        "nodeSelector": {"no": "where"},
        "containers": [{"name": "a", "image": "x", "resources": resources}],
    }
    made = await wire.create("a1", spec)
    assert made["status"]["qosClass"] == "Guaranteed"
    container = made["spec"]["containers"][0]
    assert container["resources"]["requests"] == resources["limits"]
    assert container["imagePullPolicy"] == "Always"


async def test_a_name_is_made_and_a_dry_run_stores_nothing(wire: Any, make_pod: Any) -> None:
    named = make_pod("")
    named["metadata"] = {"generateName": "box-"}
    first, second = [(await wire("POST", "pods", named)).body["metadata"]["name"] for _ in range(2)]
    assert first.startswith("box-")
    assert len(first) == len("box-") + 5
    assert first != second
    dry = await wire("POST", "pods?dryRun=All", make_pod("dry"))
    assert dry.status == 201
    assert dry.body["metadata"]["uid"]
    assert "resourceVersion" not in dry.body["metadata"]
    refused(await wire("GET", "pods/dry"), 404, "NotFound", 'pods "dry" not found')


def with_main(restart: str = "Never", **container: Any) -> Any:
    spec = {"restartPolicy": restart, "containers": [{"name": "a", "image": "x", **container}]}
    return {"spec": spec}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {}}, 'Pod "" is invalid: metadata.name: Required value: name or generateName'),
        ({"metadata": {"name": "A_b"}}, 'Pod "A_b" is invalid: metadata.name: Invalid value: "A_b": a'),
        ({"metadata": {"name": "p", "labels": {"a": "b c"}}}, 'metadata.labels: Invalid value: "b c": a'),
        ({"metadata": {"name": "p", "annotations": {"a": "x" * 300_000}}}, "metadata.annotations: Too long"),
        ({"spec": {}}, 'Pod "p" is invalid: spec.containers: Required value'),
        (with_main(image=""), "spec.containers[0].image: Required value"),
        (with_main(image=" x"), 'spec.containers[0].image: Invalid value: " x": must not have leading'),
        (with_main(env=[{"name": "A B\x01"}]), 'containers[0].env[0].name: Invalid value: "A B\\x01"'),
        (with_main(volumeMounts=[{"name": "v", "mountPath": "/x"}]), 'volumeMounts[0].name: Not found: "v"'),
        (with_main(restart="No"), 'spec.restartPolicy: Unsupported value: "No": supported values'),
    ],
)  # fmt: skip
async def test_what_is_no_pod_is_refused(wire: Any, make_pod: Any, change: Any, message: str) -> None:
    refused(await wire("POST", "pods", {**make_pod("p"), **change}), 422, "Invalid", message)


async def test_what_belongs_elsewhere_is_refused(wire: Any, make_pod: Any) -> None:
    elsewhere = make_pod("p", namespace="other")
    message = "the namespace of the provided object does not match the namespace sent on the request"
    refused(await wire("POST", "pods", elsewhere), 400, "BadRequest", message)
    node = {**make_pod("p"), "kind": "Node"}
    message = 'Node in version "v1" cannot be handled as a Pod'
    refused(await wire("POST", "pods", node), 400, "BadRequest", message)


async def test_requests_that_cannot_be_read(wire: Any, make_pod: Any) -> None:
    refused(
        await wire("POST", "pods", b"{nope"),
        400,
        "BadRequest",
        "the object provided is unrecognized (must be of type Pod)",
    )
    refused(
        await wire("POST", "pods", b"x", media_type="text/plain"),
        415,
        "UnsupportedMediaType",
        "accepted media types",
    )
    refused(
        await wire("GET", "pods", headers={"Accept": "text/html"}),
        406,
        "NotAcceptable",
        "406: Not Acceptable",
    )
    refused(await wire("PUT", "pods", make_pod("p")), 405, "MethodNotAllowed", "does not allow this method")
    refused(await wire("GET", "/api/v1/foos"), 404, "NotFound", "could not find the requested resource")
    assert (await wire("GET", "/apis/nope/v1/foos")).body == b"404 page not found\n"
    elsewhere = "/api/v1/namespaces/not-there/pods"
    refused(await wire("POST", elsewhere, make_pod("p")), 404, "NotFound", 'namespaces "not-there" not found')
    assert (await wire("GET", elsewhere)).body["items"] == []
    large = {**make_pod("p"), "metadata": {"name": "p", "annotations": {"a": "x" * (4 << 20)}}}
    refused(await wire("POST", "pods", large), 413, "RequestEntityTooLarge", "limit is 3145728")


async def test_a_token_that_nobody_gave_is_refused(access: Any) -> None:
    connector = aiohttp.TCPConnector(ssl=access.tls_of_a_stranger or True)
    headers = {"Authorization": "Bearer wrong"}
    stranger = aiohttp.ClientSession(access.server, connector=connector, headers=headers)
    async with stranger as http, http.get("/api/v1/pods") as response:
        assert response.status == 401
        assert (await response.json())["message"] == "Unauthorized"


async def test_patches_change_what_they_name(wire: Any) -> None:
    made = await wire.create("a1", labels={"a": "1", "b": "2"})
    await wire.until("a1", lambda found: "conditions" in found["status"])
    merged = await wire("PATCH", "pods/a1", {"metadata": {"labels": {"a": None, "c": "3"}}}, media_type=MERGE)
    assert merged.body["metadata"]["labels"] == {"b": "2", "c": "3"}
    operations = [
        {"op": "test", "path": "/metadata/labels/b", "value": "2"},
        {"op": "add", "path": "/metadata/labels/x~1y", "value": "4"},
        {"op": "remove", "path": "/metadata/labels/c"},
    ]
    patched = await wire("PATCH", "pods/a1", operations, media_type=JSON_PATCH)
    assert patched.body["metadata"]["labels"] == {"b": "2", "x/y": "4"}
    same = await wire("PATCH", "pods/a1", {}, media_type=MERGE)
    assert same.body["metadata"]["resourceVersion"] == patched.body["metadata"]["resourceVersion"]
    assert int(same.body["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    operations[0]["value"] = "other"
    refused(
        await wire("PATCH", "pods/a1", operations, media_type=JSON_PATCH),
        422,
        "Invalid",
        "the server rejected our request",
    )
    refused(
        await wire("PATCH", "pods/a1", {}, media_type="application/json"),
        415,
        "UnsupportedMediaType",
        "415: Unsupported",
    )
    refused(
        await wire("PATCH", "pods/a1", {"metadata": {"name": "z"}}, media_type=MERGE),
        400,
        "BadRequest",
        "does not match the name on the URL",
    )
    refused(await wire("PATCH", "pods/none", {}, media_type=MERGE), 404, "NotFound", 'pods "none" not found')


async def test_a_change_of_an_older_version_is_a_conflict(wire: Any) -> None:
    made = (await wire.create("a1"))["metadata"]
    body = {"metadata": {"resourceVersion": made["resourceVersion"], "annotations": {"n": "1"}}}
    while (answer := await wire("PATCH", "pods/a1", body, media_type=MERGE)).status == 409:
        body["metadata"]["resourceVersion"] = (await wire("GET", "pods/a1")).body["metadata"][
            "resourceVersion"
        ]
    body["metadata"]["annotations"]["n"] = "2"
    message = 'Operation cannot be fulfilled on pods "a1": the object has been modified'
    details = refused(await wire("PATCH", "pods/a1", body, media_type=MERGE), 409, "Conflict", message)
    assert details == {"name": "a1", "kind": "pods"}
    old = answer.body
    old["metadata"]["resourceVersion"] = made["resourceVersion"]
    refused(await wire("PUT", "pods/a1", old), 409, "Conflict", message)
    del old["metadata"]["resourceVersion"]
    old["metadata"]["labels"] = {"put": "yes"}
    put = await wire("PUT", "pods/a1", old)
    assert (put.status, put.body["metadata"]["labels"]) == (200, {"put": "yes"})
    wrong = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}}
    refused(
        await wire("PATCH", "pods/a1", wrong, media_type=MERGE), 422, "Invalid", "metadata.uid: Invalid value"
    )


async def test_spec_and_status_are_changed_apart(wire: Any) -> None:
    await wire.create("a1")
    await wire.until("a1", lambda found: "conditions" in found["status"])
    status = {
        "status": {"message": "from status"},
        "spec": {"activeDeadlineSeconds": 9},
        "metadata": {"labels": {"a": "b"}},
    }
    changed = (await wire("PATCH", "pods/a1/status", status, media_type=MERGE)).body
    assert changed["status"]["message"] == "from status"
    assert changed["metadata"]["labels"] == {"a": "b"}
    assert "activeDeadlineSeconds" not in changed["spec"]
    ignored = await wire("PATCH", "pods/a1", {"status": {"message": "from spec"}}, media_type=MERGE)
    assert ignored.body["status"]["message"] == "from status"
    ready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    merged = (await wire("PATCH", "pods/a1/status", ready, media_type=STRATEGIC)).body["status"]["conditions"]
    assert {"Ready", "PodScheduled"} <= {one["type"] for one in merged}


async def test_a_spec_is_fixed_but_for_a_lower_deadline(wire: Any) -> None:
    await wire.create("a1")
    command = {"spec": {"containers": [{"name": "main", "command": ["other"]}]}}
    answer = await wire("PATCH", "pods/a1", command, media_type=STRATEGIC)
    refused(answer, 422, "Invalid", "spec: Forbidden: pod updates may not change fields other than")
    for seconds in (3000, 2000):
        lower = await wire("PATCH", "pods/a1", {"spec": {"activeDeadlineSeconds": seconds}}, media_type=MERGE)
        assert (lower.status, lower.body["spec"]["activeDeadlineSeconds"]) == (200, seconds)
    assert lower.body["metadata"]["generation"] == 3
    raised = await wire("PATCH", "pods/a1", {"spec": {"activeDeadlineSeconds": 4000}}, media_type=MERGE)
    refused(raised, 422, "Invalid", "spec.activeDeadlineSeconds: Invalid value: 4000")


async def test_a_delete_hits_only_the_object_that_was_meant(wire: Any) -> None:
    made = (await wire.create("a1"))["metadata"]
    other = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    details = refused(await wire("DELETE", "pods/a1", other), 409, "Conflict", "the UID in the precondition")
    assert details == {"name": "a1", "kind": "Pod"}
    older = {"preconditions": {"resourceVersion": "1"}}
    refused(
        await wire("DELETE", "pods/a1", older), 409, "Conflict", "the ResourceVersion in the precondition (1)"
    )
    gone = await wire("DELETE", "pods/a1", {"preconditions": {"uid": made["uid"]}})
    assert gone.body["metadata"]["deletionGracePeriodSeconds"] == 0
    missing = 'pods "a1" not found'
    refused(await wire("GET", "pods/a1"), 404, "NotFound", missing)
    details = refused(await wire("DELETE", "pods/a1"), 404, "NotFound", missing)
    assert details == {"name": "a1", "kind": "pods"}


async def test_a_finalizer_holds_an_object(wire: Any) -> None:
    await wire.create("a1", finalizers=["test.io/keep"])
    await wire.until("a1", lambda found: "conditions" in found["status"])  # the scheduler is done with it
    first = (await wire("DELETE", "pods/a1")).body["metadata"]
    assert first["generation"] == 2
    again = (await wire("DELETE", "pods/a1")).body["metadata"]
    assert again["resourceVersion"] == first["resourceVersion"]
    more = {"metadata": {"finalizers": ["test.io/other", "test.io/keep"]}}
    refused(
        await wire("PATCH", "pods/a1", more, media_type=MERGE),
        422,
        "Invalid",
        "no new finalizers can be added",
    )
    assert (
        await wire("PATCH", "pods/a1", {"metadata": {"finalizers": None}}, media_type=MERGE)
    ).status == 200
    refused(await wire("GET", "pods/a1"), 404, "NotFound", 'pods "a1" not found')


async def test_lists_come_in_pages_of_one_version(wire: Any, make_pod: Any) -> None:
    for number in range(5):
        await wire.create(f"p{number}", labels={"app": "x", "even": str(number % 2 == 0).lower()})
    names, token, versions = [], "", set()
    while True:
        page = (await wire("GET", f"pods?limit=2&labelSelector=app%3Dx&continue={token}")).body
        assert page["kind"] == "PodList"
        assert "kind" not in page["items"][0]
        names += [one["metadata"]["name"] for one in page["items"]]
        versions.add(page["metadata"]["resourceVersion"])
        token = page["metadata"].get("continue", "")
        if not token:
            break
        await wire("DELETE", "pods/p3")
        await wire("POST", "pods", make_pod("p2b", labels={"app": "x"}))
    assert names == [f"p{number}" for number in range(5)]
    assert len(versions) == 1
    refused(await wire("GET", "pods?continue=abc"), 400, "BadRequest", "continue key is not valid")
    refused(await wire("GET", "pods?limit=abc"), 400, "BadRequest", 'strconv.ParseInt: parsing "abc"')


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("labelSelector=app%3Dx,even%3Dtrue", ["p0"]),
        ("labelSelector=even!%3Dtrue", ["p1", "p2"]),
        ("labelSelector=even", ["p0", "p1"]),
        ("labelSelector=!even", ["p2"]),
        ("labelSelector=even%20in%20(true,%20false),app", ["p0", "p1"]),
        ("labelSelector=even%20notin%20(false)", ["p0", "p2"]),
        ("fieldSelector=metadata.name%3Dp1", ["p1"]),
        ("fieldSelector=metadata.name!%3Dp1,status.phase%3DPending", ["p0", "p2"]),
        ("fieldSelector=spec.nodeName%3D", ["p0", "p1", "p2"]),
    ],
)
async def test_selectors_select(wire: Any, query: str, names: list[str]) -> None:
    for number, labels in enumerate(
        ({"app": "x", "even": "true"}, {"app": "x", "even": "false"}, {"app": "x"})
    ):
        await wire.create(f"p{number}", labels=labels)
    found = (await wire("GET", f"pods?{query}")).body["items"]
    assert [one["metadata"]["name"] for one in found] == names


async def test_selectors_that_mean_nothing_are_refused(wire: Any) -> None:
    refused(
        await wire("GET", "pods?labelSelector=a%20b%20c"),
        400,
        "BadRequest",
        "unable to parse requirement: found 'b'",
    )
    refused(
        await wire("GET", "pods?fieldSelector=spec.image%3Dx"),
        400,
        "BadRequest",
        "field label not supported: spec.image",
    )


@pytest.mark.slow
async def test_a_version_from_the_future_is_waited_for_and_then_refused(wire: Any) -> None:
    await wire.create("a1")
    paths = (
        "pods/a1?resourceVersion=99999999",
        "pods?resourceVersion=99999999&resourceVersionMatch=NotOlderThan",
    )
    for answer in await asyncio.gather(*(wire("GET", path) for path in paths)):
        details = refused(answer, 504, "Timeout", "Too large resource version: 99999999, current: ")
        assert details["causes"][0]["reason"] == "ResourceVersionTooLarge"
        assert answer.headers["Retry-After"] == "1"


async def test_namespaces_are_objects_too(wire: Any) -> None:
    path = f"/api/v1/namespaces/{wire.namespace}"
    found = (await wire("GET", path)).body
    assert found["status"]["phase"] == "Active"
    assert found["metadata"]["labels"] == {"kubernetes.io/metadata.name": wire.namespace}
    again = await wire("POST", "/api/v1/namespaces", {"metadata": {"name": wire.namespace}})
    refused(again, 409, "AlreadyExists", f'namespaces "{wire.namespace}" already exists')
