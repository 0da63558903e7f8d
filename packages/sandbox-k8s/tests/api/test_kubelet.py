"""What becomes of a pod: stages, events, ends. Runs on the fake and on a real cluster."""

from typing import Any

import pytest

pytestmark = pytest.mark.anyio


def state_of(found: Any) -> tuple[str, Any]:
    """The state of the container: its kind and what it says."""
    statuses = found["status"].get("containerStatuses")
    return next(iter(statuses[0]["state"].items())) if statuses else ("", {})


def conditions(found: Any) -> dict[str, str]:
    return {one["type"]: one["status"] for one in found["status"].get("conditions", [])}


def is_running(found: Any) -> bool:
    return found["status"]["phase"] == "Running" and conditions(found).get("Ready") == "True"


async def stages(wire: Any, name: str, until: Any) -> list[Any]:
    """Every state of a pod, from its creation."""
    seen: list[Any] = []
    async with wire.watching(fieldSelector=f"metadata.name={name}") as following:
        while not seen or not until(seen[-1]):
            event = await following()
            assert event is not None, seen[-1]["object"]["status"]
            seen.append(event)
    return [one["object"] for one in seen]


async def reasons(wire: Any, name: str, *wanted: str) -> dict[str, Any]:
    """Events of a pod by reason, once those that are wanted have come."""
    query = {"fieldSelector": f"involvedObject.name={name},involvedObject.kind=Pod"}
    seen: dict[str, Any] = {}
    async with wire.watching("events", **query) as following:
        while not {*wanted} <= seen.keys():
            event = (await following())["object"]
            seen[event["reason"]] = event
    return seen


async def test_a_pod_comes_up_stage_by_stage(wire: Any, run: Any) -> None:
    await wire.create("a1", run("sleep", "60"))
    found = await stages(wire, "a1", lambda event: is_running(event["object"]))
    kinds = list(dict.fromkeys(state_of(one)[0] for one in found))
    assert [kind for kind in kinds if kind] == ["waiting", "running"]
    last = found[-1]
    assert last["spec"]["nodeName"]
    assert last["status"]["podIP"] == last["status"]["podIPs"][0]["ip"]
    assert set(conditions(last).values()) == {"True"}
    container = last["status"]["containerStatuses"][0]
    assert (container["restartCount"], container["started"], container["ready"]) == (0, True, True)
    assert container["containerID"].startswith("containerd://")
    events = await reasons(wire, "a1", "Scheduled", "Pulled", "Created", "Started")
    assert (events["Created"]["message"], events["Started"]["message"]) == (
        "Container created",
        "Container started",
    )
    assert events["Pulled"]["message"].endswith("already present on machine and can be accessed by the pod")
    assert events["Scheduled"]["firstTimestamp"] is None
    assert events["Scheduled"]["eventTime"]
    assert (events["Started"]["eventTime"], events["Started"]["count"]) == (None, 1)
    assert events["Started"]["involvedObject"]["fieldPath"] == "spec.containers{main}"


@pytest.mark.parametrize(("code", "phase", "reason"), [(3, "Failed", "Error"), (0, "Succeeded", "Completed")])
async def test_the_end_of_a_container_is_told_before_the_phase(
    wire: Any, run: Any, needs_processes: None, code: int, phase: str, reason: str
) -> None:
    await wire.create("a1", run("sh", "-c", f"echo last words; exit {code}"))
    found = await stages(wire, "a1", lambda event: event["object"]["status"]["phase"] == phase)
    first = next(one for one in found if state_of(one)[0] == "terminated")
    assert first["status"]["phase"] == "Running"
    told = state_of(found[-1])[1]
    assert (told["exitCode"], told["reason"]) == (code, reason)
    assert told.get("message") == ("last words\n" if code else None)
    assert conditions(found[-1])["Ready"] == "False"


async def test_a_program_that_is_missing_is_a_start_error(wire: Any, run: Any, needs_processes: None) -> None:
    await wire.create("a1", run("/no/such"))
    found = await wire.until("a1", lambda found: found["status"]["phase"] == "Failed")
    told = state_of(found)[1]
    assert (told["exitCode"], told["reason"]) == (128, "StartError")
    assert 'exec: "/no/such": stat /no/such: no such file or directory' in told["message"]


async def test_a_program_that_ignores_the_signal_costs_the_whole_grace(wire: Any, run: Any) -> None:
    await wire.create("a1", run("sleep", "60"))
    await wire.until("a1", is_running)
    asked = await wire("DELETE", "pods/a1")
    metadata = asked.body["metadata"]
    assert metadata["deletionGracePeriodSeconds"] == 1
    assert asked.body["status"]["phase"] == "Running"
    longer = (await wire("DELETE", "pods/a1", {"gracePeriodSeconds": 50})).body["metadata"]
    assert longer["deletionTimestamp"] == metadata["deletionTimestamp"]
    found = await stages(wire, "a1", lambda event: event["type"] == "DELETED")
    killed = [one for one in found if one["status"]["phase"] == "Failed"]
    assert killed[0]["metadata"]["deletionGracePeriodSeconds"] == 1
    assert state_of(killed[0])[1]["exitCode"] == 137
    assert found[-1]["metadata"]["deletionGracePeriodSeconds"] == 0
    assert (await reasons(wire, "a1", "Killing"))["Killing"]["message"] == "Stopping container main"


async def test_a_program_that_ends_at_the_signal_has_succeeded(
    wire: Any, run: Any, needs_processes: None
) -> None:
    words = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    await wire.create("a1", run("sh", "-c", words, terminationGracePeriodSeconds=20))
    await wire.until("a1", is_running)
    await wire.says("a1", b"ready")
    await wire("DELETE", "pods/a1")
    found = await stages(wire, "a1", lambda event: event["type"] == "DELETED")
    assert "Succeeded" in {one["status"]["phase"] for one in found}


async def test_without_grace_a_pod_is_gone_at_once_and_says_nothing(wire: Any, run: Any) -> None:
    await wire.create("a1", run("sleep", "60"))
    await wire.until("a1", is_running)
    begin = (await wire("GET", "pods")).body["metadata"]["resourceVersion"]
    await wire("DELETE", "pods/a1", {"gracePeriodSeconds": 0})
    assert (await wire("GET", "pods/a1")).status == 404
    async with wire.watching(resourceVersion=begin) as following:
        event = await following()
        while event["type"] != "DELETED":
            event = await following()
    assert event["object"]["status"]["phase"] == "Running"


async def test_an_eviction_marks_the_pod_before_it_ends(wire: Any, run: Any) -> None:
    await wire.create("a1", run("sleep", "60"))
    await wire.until("a1", is_running)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a1"}}
    dry = await wire("POST", "pods/a1/eviction?dryRun=All", eviction)
    assert (dry.status, dry.body["status"]) == (201, "Success")
    wrong = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    refused = await wire("POST", "pods/a1/eviction", {**eviction, "deleteOptions": wrong})
    assert (refused.status, refused.body["reason"]) == (409, "Conflict")
    assert (await wire("POST", "pods/a1/eviction", eviction)).status == 201
    found = await wire.until("a1", lambda found: found["status"]["phase"] == "gone")
    marks = [one for one in found["status"]["conditions"] if one["type"] == "DisruptionTarget"]
    assert [(one["status"], one["reason"]) for one in marks] == [("True", "EvictionByEvictionAPI")]
    missing = await wire("POST", "pods/none/eviction", {**eviction, "metadata": {"name": "none"}})
    assert (missing.status, missing.body["reason"]) == (404, "NotFound")


async def test_a_pod_that_no_node_takes_says_why(wire: Any) -> None:
    await wire.create("a1")
    found = await wire.until("a1", lambda found: "conditions" in found["status"])
    told = next(one for one in found["status"]["conditions"] if one["type"] == "PodScheduled")
    assert (told["status"], told["reason"]) == ("False", "Unschedulable")
    assert "node(s) didn't match Pod's node affinity/selector" in told["message"]
    assert "nodeName" not in found["spec"]
    event = (await reasons(wire, "a1", "FailedScheduling"))["FailedScheduling"]
    assert event["type"] == "Warning"


async def test_a_deadline_ends_a_pod(wire: Any, run: Any, needs_processes: None) -> None:
    await wire.create("a1", run("sleep", "60", activeDeadlineSeconds=1))
    found = await wire.until("a1", lambda found: found["status"]["phase"] == "Failed")
    assert found["status"]["reason"] == "DeadlineExceeded"
    assert state_of(found)[1]["exitCode"] == 137
    assert (await reasons(wire, "a1", "DeadlineExceeded"))["DeadlineExceeded"]["type"] == "Normal"


async def test_a_pod_whose_image_has_no_name_waits_and_goes_when_it_is_told_to(wire: Any, run: Any) -> None:
    spec = run("true")
    spec["containers"][0]["image"] = "example.com/No Such"
    await wire.create("a1", spec)
    waits = await wire.until("a1", lambda found: state_of(found)[1].get("reason") == "InvalidImageName")
    assert waits["status"]["phase"] == "Pending"
    assert "couldn't parse image name" in state_of(waits)[1]["message"]
    assert (await reasons(wire, "a1", "InspectFailed"))["InspectFailed"]["type"] == "Warning"
    await wire("DELETE", "pods/a1")
    found = await stages(wire, "a1", lambda event: event["type"] == "DELETED")
    last = state_of(found[-1])[1]
    assert found[-1]["status"]["phase"] == "Failed"
    assert (last["exitCode"], last["reason"]) == (137, "ContainerStatusUnknown")
    assert last["message"] == "The container could not be located when the pod was terminated"
