"""What looks like something else: each of these misled somebody, or a tool, before."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s.kubernetes import Diagnosis, classify

FOLDER = Path(__file__).parent / "recordings"


def stage(cause: str, number: int = -1) -> dict[str, Any]:
    return json.loads((FOLDER / f"{cause}.json").read_text(encoding="utf-8"))["stages"][number]


def diagnose(seen: dict[str, Any]) -> Diagnosis:
    return classify(seen["pod"], seen["events"], seen["node"])


def main_status(seen: dict[str, Any]) -> dict[str, Any]:
    return seen["pod"]["status"]["containerStatuses"][0]


def test_ready_of_a_restarted_container_is_no_ready_sandbox() -> None:
    """Ready flaps: it is True again 0.1 s after the crash, with nothing of the old processes left."""
    seen = stage("crash-loop-always", 4)
    conditions = {one["type"]: one["status"] for one in seen["pod"]["status"]["conditions"]}
    assert conditions["Ready"] == "True"
    found = diagnose(seen)
    assert (found.state, found.failure) == ("failed", "process_crashed")
    assert "what ran in it is gone" in found.why


def test_a_restart_without_its_reason_is_still_a_restart() -> None:
    seen = stage("crash-loop-always", 4)
    main_status(seen)["lastState"] = {}
    found = diagnose(seen)
    assert (found.state, found.failure, found.guess) == ("failed", "process_crashed", True)


def test_an_oom_kill_of_a_child_is_in_no_status() -> None:
    """Only the command's exit code (137) tells; the pod is as ready as before."""
    assert diagnose(stage("oom-child-only")).state == "ready"


def test_deleted_without_a_deletion_timestamp_only_left_the_selector() -> None:
    lines = json.loads((FOLDER / "watch-selector-leave.json").read_text(encoding="utf-8"))["lines"]
    gone = next(one["object"] for one in lines if one["type"] == "DELETED")
    found = classify(gone, deleted=True)
    assert (found.state, found.failure) == ("unknown", None)
    assert "uid" in found.why


def test_a_forced_deletion_is_final_although_the_object_says_running_and_ready() -> None:
    """kubernetes/kubernetes#110507, #120449: the object goes at once, the processes later."""
    seen = stage("deleted-grace-0")
    assert seen["pod"]["status"]["phase"] == "Running"
    assert classify(seen["pod"], deleted=True).failure == "deleted"


def test_a_crash_before_the_deletion_is_the_cause_and_not_the_deletion() -> None:
    seen = stage("deleted-while-running", 3)
    end = main_status(seen)["state"]["terminated"]
    end.update(exitCode=3, finishedAt="2026-11-29T13:34:05Z")  # deleted at :09, gone by :11
    assert diagnose(seen).failure == "process_crashed"
    end.update(finishedAt="2026-11-29T13:34:10Z")  # 3 as its answer to SIGTERM
    assert diagnose(seen).failure == "deleted"


def test_out_of_memory_stays_the_cause_when_the_pod_is_deleted_afterwards() -> None:
    seen = stage("oom-mid-run")
    seen["pod"]["metadata"].update(deletionTimestamp="2026-11-29T14:00:00Z", deletionGracePeriodSeconds=0)
    assert diagnose(seen).failure == "oom_at_run"


def test_events_of_an_earlier_pod_of_the_same_name_do_not_count() -> None:
    """kubernetes-sigs/agent-sandbox#149: identity is the uid, never a name."""
    pod = stage("healthy")["pod"]
    old = stage("ephemeral-storage-emptydir")["events"]
    for event in old:
        event["involvedObject"]["name"] = pod["metadata"]["name"]
    assert classify(pod, old).state == "ready"
    for event in old:
        event["involvedObject"]["uid"] = pod["metadata"]["uid"]
    assert classify(pod, old).failure == "evicted_storage_limit"


def test_a_missing_volume_that_was_made_in_time_is_no_failure() -> None:
    seen = stage("volume-secret-missing")
    later = stage("healthy", 1)["events"][-1]
    later["involvedObject"]["uid"] = seen["pod"]["metadata"]["uid"]
    assert diagnose(seen).failure == "volume_missing"
    assert classify(seen["pod"], [*seen["events"], later]).state == "starting"


def test_a_taint_and_a_lost_node_have_one_text_and_only_the_node_tells() -> None:
    taint, lost = stage("unschedulable-taint", 0), stage("unschedulable-node-not-ready", 0)
    assert diagnose(taint).failure == "unschedulable_placement"
    assert any("example.com/gpu:NoSchedule" in one.text for one in diagnose(taint).evidence)
    assert diagnose(lost).failure == "unschedulable_nodes_down"
    for seen in (taint, lost):
        found = classify(seen["pod"], seen["events"])
        assert (found.failure, found.guess) == ("unschedulable_placement", True)


def test_where_some_nodes_are_full_and_others_do_not_fit_room_is_what_is_missing() -> None:
    seen = stage("unschedulable-node-selector")
    condition = seen["pod"]["status"]["conditions"][0]
    condition["message"] = (
        "0/9 nodes are available: 3 node(s) had untolerated taint {a: b}, 6 Insufficient memory."
    )
    assert diagnose(seen).failure == "unschedulable_resources"
    # What removing others would not help with is not what is missing.
    condition["message"] = (
        "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. "
        "preemption: 0/2 nodes are available: 2 Insufficient cpu."
    )
    assert diagnose(seen).failure == "unschedulable_placement"


def test_the_newest_of_several_events_counts_in_whatever_order_they_come() -> None:
    seen = stage("unschedulable-cpu")
    seen["pod"]["status"] = {"phase": "Pending"}
    old, new = seen["events"]
    new["message"] = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    for events in ([old, new], [new, old]):
        assert classify(seen["pod"], events).failure == "unschedulable_placement"


def test_a_time_out_that_is_added_later_does_not_hide_what_is_missing() -> None:
    """kubernetes/kubernetes#31768: one of the two texts is much better than the other."""
    seen = stage("volume-secret-missing")
    late = copy.deepcopy(seen["events"][-1])
    late["message"] = (
        "Unable to attach or mount volumes: unmounted volumes=[v]: timed out waiting for the condition"
    )
    late["metadata"].update(uid="late", name="late")
    late["lastTimestamp"] = "2026-11-29T23:00:00Z"
    assert classify(seen["pod"], [*seen["events"], late]).failure == "volume_missing"
    found = classify(seen["pod"], [late])
    assert (found.state, found.failure, found.guess) == ("failing", "volume_failed", False)


def test_a_crash_is_not_explained_by_a_pull_that_failed_before() -> None:
    seen = stage("exit-at-once-never")
    failed = next(one for one in stage("image-flaky-then-ok")["events"] if one["reason"] == "Failed")
    failed["involvedObject"]["uid"] = seen["pod"]["metadata"]["uid"]
    found = classify(seen["pod"], [*seen["events"], failed])
    assert found.failure == "process_crashed"
    assert not any("pull" in one.text for one in found.evidence)


def test_a_container_that_its_kubelet_cannot_find_any_more_was_probably_on_a_lost_node() -> None:
    seen = stage("exit-at-once-never")
    main_status(seen)["state"]["terminated"].update(reason="ContainerStatusUnknown", exitCode=137)
    assert (diagnose(seen).state, diagnose(seen).failure, diagnose(seen).guess) == (
        "failed",
        "node_lost",
        True,
    )


def test_an_event_that_is_counted_up_is_one_event() -> None:
    seen = stage("volume-secret-missing")
    event = seen["events"][-1]
    for counts in ((1, 4), (4, 1), (4, 4, 1)):
        events = [{**event, "count": count} for count in counts]
        assert [one.source for one in classify(seen["pod"], events).evidence] == ["event FailedMount x4"]


def test_a_status_that_is_behind_does_not_bring_back_what_its_events_have_got_over() -> None:
    waiting, good = stage("image-flaky-then-ok", 0), stage("image-flaky-then-ok")
    assert classify(waiting["pod"], good["events"]).state == "starting"
    early, placed = stage("preemptor", 0), stage("preemptor")
    early["pod"]["status"] = {"phase": "Pending"}
    assert classify(early["pod"], early["events"]).failure == "unschedulable_resources"
    assert classify(early["pod"], placed["events"]).state == "starting"


def test_a_container_that_is_being_stopped_for_no_known_reason_is_named_as_a_guess() -> None:
    seen = stage("deleted-while-running", 2)
    found = classify(stage("deleted-while-running", 1)["pod"], seen["events"])
    assert (found.state, found.failure, found.guess) == ("failing", "deleted", True)


def test_a_pod_that_its_kubelet_has_given_up_has_failed_before_its_phase_says_so() -> None:
    seen = stage("active-deadline", 2)
    assert seen["pod"]["status"]["phase"] == "Running"
    found = classify(seen["pod"])
    assert (found.state, found.failure, found.guess) == ("failed", "pod_failed", True)


@pytest.mark.parametrize(
    ("phase", "failure", "guess"),
    [("Failed", "pod_failed", True), ("Succeeded", "process_ended", False), ("Unknown", "node_lost", True)],
)
def test_a_phase_alone(phase: str, failure: str, guess: bool) -> None:
    found = classify({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"phase": phase}})
    assert (found.failure, found.guess) == (failure, guess)


def test_a_liveness_kill_of_an_earlier_run_does_not_explain_the_crash_of_this_one() -> None:
    seen = stage("liveness-failing")
    assert diagnose(seen).failure == "liveness_failed"
    crash = {
        "exitCode": 3,
        "reason": "Error",
        "startedAt": "2026-11-29T15:00:00Z",
        "finishedAt": "2026-11-29T15:00:09Z",
    }
    main_status(seen).update(restartCount=2, lastState={"terminated": crash})
    assert diagnose(seen).failure == "process_crashed"


def test_a_sidecar_that_restarted_is_no_failed_init_container() -> None:
    seen = stage("healthy")
    end = {"terminated": {"exitCode": 1, "reason": "Error"}}
    sidecar = {"name": "proxy", "state": {"running": {}}, "lastState": end, "restartCount": 1, "ready": True}
    seen["pod"]["status"]["initContainerStatuses"] = [sidecar]
    assert diagnose(seen).state == "ready"


def test_a_node_that_is_back_has_not_lost_its_pod() -> None:
    back = stage("node-lost", 5)
    assert diagnose(back).state == "starting"
    assert "reports again" in diagnose(back).why
    back["node"] = None  # without the node, only what its controller wrote to the pod is known
    assert diagnose(back).failure == "node_lost"


@pytest.mark.parametrize(
    ("reason", "message", "failure"),
    [
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", "node_shutdown"),
        (
            "Evicted",
            "The node was low on resource: memory. Threshold quantity: 100Mi",
            "evicted_node_pressure",
        ),
        (
            "Evicted",
            "The node was low on resource: ephemeral-storage. Container main was using 9Gi, request is 0",
            "evicted_node_pressure",
        ),
        ("NodeAffinity", "Pod was rejected: Predicate NodeAffinity failed", "kubelet_rejected"),
        ("UnexpectedAdmissionError", "Allocate failed due to no devices", "kubelet_rejected"),
    ],
)
def test_why_a_kubelet_ended_a_whole_pod(reason: str, message: str, failure: str) -> None:
    """omnigent-ai/omnigent#6744: a full node is the infrastructure's fault, one over its limit the task's."""
    status = {"phase": "Failed", "reason": reason, "message": message}
    pod = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n"}, "status": status}
    assert (classify(pod).failure, classify(pod).guess) == (failure, False)
    assert classify(pod).fault == "infra"


def test_an_event_about_the_network_counts_until_the_network_is_there() -> None:
    seen = stage("healthy", 0)
    event = copy.deepcopy(seen["events"][0])
    event.update(reason="FailedCreatePodSandBox", type="Warning", message='plugin type="bridge" failed (add)')
    event["metadata"].update(uid="other", name="other")
    assert classify(seen["pod"], [*seen["events"], event]).failure == "pod_sandbox"
    assert classify(stage("healthy", 2)["pod"], [event]).state == "ready"


def test_no_client_library_is_loaded() -> None:
    code = "import sys, sandbox_k8s.kubernetes, sandbox_k8s.cli; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
