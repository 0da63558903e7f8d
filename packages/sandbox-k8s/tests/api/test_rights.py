"""Rights, and kinds of which there are none, for ``doctor``. Runs on the fake and on a real cluster."""

import uuid
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def review(verb: str, resource: str, namespace: str, subresource: str = "") -> dict[str, Any]:
    attributes = {"namespace": namespace, "group": "", "resource": resource, "verb": verb}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes | {"subresource": subresource}},
    }


async def test_a_review_is_answered_and_its_empty_fields_are_left_out(wire: Any) -> None:
    answer = await wire("POST", REVIEWS, review("create", "pods", wire.namespace, "proxy"))
    assert answer.status == 201
    assert answer.body["spec"]["resourceAttributes"] == {
        "namespace": wire.namespace, "verb": "create", "resource": "pods", "subresource": "proxy",
    }  # fmt: skip
    assert answer.body["status"] == {"allowed": True}
    answer = await wire("POST", REVIEWS, review("list", "pods", wire.namespace))
    assert "subresource" not in answer.body["spec"]["resourceAttributes"]


@pytest.mark.parametrize(
    ("path", "kind", "version"),
    [
        ("resourcequotas", "ResourceQuotaList", "v1"),
        ("limitranges", "LimitRangeList", "v1"),
        (
            "/apis/networking.k8s.io/v1/namespaces/NS/networkpolicies",
            "NetworkPolicyList",
            "networking.k8s.io/v1",
        ),
    ],
)
async def test_a_list_of_nothing(wire: Any, path: str, kind: str, version: str) -> None:
    answer = await wire("GET", path.replace("NS", wire.namespace))
    assert (answer.status, answer.body["kind"], answer.body["apiVersion"]) == (200, kind, version)
    assert answer.body["items"] == []
    assert int(answer.body["metadata"]["resourceVersion"]) > 0


async def test_a_dry_run_leaves_nothing(wire: Any, make_pod: Any) -> None:
    name = f"dry-{uuid.uuid4().hex[:8]}"
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    answer = await wire("POST", "pods", make_pod(name), params=query)
    assert (answer.status, answer.body["metadata"]["name"]) == (201, name)
    assert (await wire("GET", f"pods/{name}")).status == 404
