"""Every stage of every recording of a real cluster; the same with events late, doubled or missing."""

import json
import string
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_k8s import ConfigError, Fault
from sandbox_k8s.kubernetes import FAILURES, Diagnosis, FailureName, classify, overdue

FOLDER = Path(__file__).parent / "recordings"

# One word per stage, "*n" repeats it. A class with "~" is failing (it may come right), without it failed.
MEANING = {
    "active-deadline": "starting ready deadline_exceeded*2",
    "config-configmap-missing": "starting config_missing*2",
    "config-secret-key-missing": "starting*2 config_missing*2",
    "config-secret-missing": "starting config_missing*2",
    "crash-loop-always": "starting*3 ready process_crashed*9",
    "create-container-no-command": "starting command_missing*2",
    "deleted-grace-0": "starting ready deleted",
    "deleted-while-image-missing": "starting image_name_invalid*2 deleted*3",
    "deleted-while-pending": "unschedulable_resources~ deleted",
    "deleted-while-running": "starting ready deleted*3",
    "drained": "starting ready*2 drained*3",
    "ephemeral-storage-container": "starting*2 ready evicted_storage_limit*2",
    "ephemeral-storage-emptydir": "starting*2 ready evicted_storage_limit*2",
    "ephemeral-storage-not-enforced": "starting ready",
    "evicted-api": "starting ready drained*3",
    "exec-format-error-init": "starting*5 image_architecture*2",
    "exec-format-error": "starting*4 ready image_architecture*2",
    "exit-at-once-never": "starting*3 ready process_crashed*2",
    "exit-zero-never": "starting*3 ready process_ended*2",
    "healthy": "starting*2 ready",
    "image-auth-401": "starting*2 image_auth*3",
    "image-auth-403": "starting image_auth*3",
    "image-flaky-then-ok": "starting image_registry_error~*3 ready",
    "image-layer-cut": "starting*2 image_pull_cut~*3",
    "image-name-invalid": "starting image_name_invalid*2",
    "image-never-pull": "starting image_not_present",
    "image-not-found": "starting*2 image_not_found*3",
    "image-rate-limit": "starting image_rate_limit~*3",
    "image-registry-500": "starting image_registry_error~*3",
    "image-registry-503": "starting image_registry_error~*3",
    "image-registry-dns": "starting image_registry_host_unknown~*3",
    "image-registry-refused": "starting image_registry_unreachable~*3",
    "image-registry-tls": "starting image_registry_tls*3",
    "image-volume-refused": "starting image_registry_unreachable~*3",
    "init-fails-always": "starting*3 init_failed~*3",
    "init-fails-never": "starting*3 init_failed*2",
    "liveness-failing-never": "starting ready*2 liveness_failed*3",
    "liveness-failing": "starting ready*2 liveness_failed*2",
    "node-lost-evicted": "starting ready*2 node_lost~*2 node_lost*7",
    "node-lost": "starting ready*2 node_lost~*2 starting ready",
    "oom-at-init": "starting*3 oom_at_start*3",
    "oom-at-start": "starting ready oom_at_start*2",
    "oom-child-only": "starting*3 ready",
    "oom-mid-run-always": "starting*3 ready oom_at_run*3",
    "oom-mid-run": "starting*3 ready oom_at_run*2",
    "out-of-cpu": "kubelet_rejected",
    "preempted": "starting ready preempted*3",
    "preemptor": "unschedulable_resources~ starting ready",
    "present-image-behind-stalled-pull": "starting ready",
    "readiness-failing": "starting*3",
    "readiness-lost": "starting*2 ready*2 readiness_failed~",
    "slow-pull-queued": "starting*2 ready",
    "slow-pull": "starting*2 ready",
    "stalled-pull-queued": "starting*2",
    "stalled-pull": "starting*2 deleted",
    "start-error-always": "starting*3 command_not_found*6",
    "start-error-never": "starting*2 command_not_found*3",
    "start-error-permission": "starting*2 command_not_executable*3",
    "termination-clean": "starting ready deleted*3",
    "termination-grace-exceeded": "starting*2 ready deleted*3",
    "unschedulable-cordon": "unschedulable_nodes_down~",
    "unschedulable-cpu": "unschedulable_resources~",
    "unschedulable-ephemeral-storage": "unschedulable_resources~*2",
    "unschedulable-memory": "unschedulable_resources~",
    "unschedulable-node-not-ready": "unschedulable_nodes_down~ deleted",
    "unschedulable-node-selector": "unschedulable_placement~",
    "unschedulable-pvc-missing": "volume_missing",
    "unschedulable-taint": "unschedulable_placement~",
    "volume-configmap-missing": "starting*2 volume_missing",
    "volume-hostpath-missing": "starting volume_missing",
    "volume-secret-missing": "starting volume_missing",
    "volume-unmounted-missing": "starting*2 ready",
}
STAGES: dict[str, list[dict[str, Any]]] = {
    cause: json.loads((FOLDER / f"{cause}.json").read_text(encoding="utf-8"))["stages"] for cause in MEANING
}
CASES = [(cause, number) for cause, stages in STAGES.items() for number in range(len(stages))]


def meanings(cause: str) -> list[str]:
    words: list[str] = []
    for part in MEANING[cause].split():
        word, _, times = part.partition("*")
        words += [word] * int(times or 1)
    return words


def word(found: Diagnosis) -> str:
    return (found.failure or found.state) + ("~" if found.state == "failing" else "")


def at(cause: str, number: int, **changes: Any) -> Diagnosis:
    stage = {**STAGES[cause][number], **changes}
    return classify(stage["pod"], stage["events"], stage["node"], deleted=stage.get("gone", False))


@pytest.mark.parametrize("cause", MEANING)
def test_every_stage_of_every_recording(cause: str) -> None:
    found = [at(cause, number) for number in range(len(STAGES[cause]))]
    assert [word(one) for one in found] == meanings(cause)
    for one in found:
        assert one.why
        assert not one.guess
        assert (one.details is None) == (one.state not in ("failing", "failed"))
        assert bool(one.evidence) or one.failure is None, "a failure class without evidence"


def test_no_recording_is_left_out() -> None:
    files = {path.stem for path in FOLDER.glob("*.json") if '"stages"' in path.read_text(encoding="utf-8")}
    assert files == set(MEANING)


def test_the_list_is_closed_and_complete() -> None:
    assert set(FAILURES) == set(get_args(FailureName))
    for failure in FAILURES.values():
        assert failure.fault in get_args(Fault)
        assert failure.title.endswith(".")
        assert failure.advice.endswith(".")


def test_only_what_a_task_asked_for_itself_may_count_against_it() -> None:
    """allenai/open-instruct#1887: zeros for infrastructure failures bias the training."""
    assert {name for name, one in FAILURES.items() if one.fault in ("task", "agent")} == {
        "oom_at_start",
        "oom_at_run",
        "evicted_storage_limit",
        "spec_invalid",
        "request_too_large",
    }


everything = st.sampled_from(CASES).flatmap(
    lambda case: st.tuples(
        st.just(case),
        st.lists(st.sampled_from([e for s in STAGES[case[0]] for e in s["events"]] or [None]), max_size=12),
        st.booleans(),
    )
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(everything)
def test_events_late_early_doubled_or_missing_never_give_another_class(
    drawn: tuple[tuple[str, int], list[dict[str, Any] | None], bool],
) -> None:
    (cause, number), events, with_node = drawn
    stage = STAGES[cause][number]
    events = [one for one in events if one is not None]
    found = at(cause, number, events=events, node=stage["node"] if with_node else None)
    possible = {one.rstrip("~") for one in meanings(cause)} | {"starting"}
    assert found.guess or word(found).rstrip("~") in possible
    if found.state == "ready":
        ready = [one["status"] for one in stage["pod"]["status"]["conditions"] if one["type"] == "Ready"]
        assert ready == ["True"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(case: tuple[str, int], random: Any) -> None:
    events = list(STAGES[case[0]][case[1]]["events"])
    shuffled = [*events, *random.choices(events, k=3)] if events else []
    random.shuffle(shuffled)
    assert at(*case, events=shuffled) == at(*case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_status_behind_its_events_is_never_worse_informed(case: tuple[str, int]) -> None:
    cause, number = case
    expected = meanings(cause)[number]
    found = at(cause, number, events=[e for s in STAGES[cause][number:] for e in s["events"]])
    if FAILURES.get(expected) is not None:  # it had failed for good: later events change nothing
        assert word(found) == expected
    else:
        assert found.guess or word(found) in (expected, "starting", *meanings(cause)[number:])


@pytest.mark.parametrize(
    "cause", [cause for cause in MEANING if cause.startswith(("deleted-", "termination-", "stalled-pull"))]
)
def test_a_deletion_that_was_asked_for_is_no_failure(cause: str) -> None:
    for stage in STAGES[cause]:
        found = classify(stage["pod"], stage["events"], deleted=stage.get("gone", False), asked=True)
        if "deletionTimestamp" in stage["pod"]["metadata"]:
            assert (found.state, found.failure) == ("stopping", None)
        else:
            assert found.state != "stopping"


@pytest.mark.parametrize(
    ("cause", "number", "becomes"),
    [
        ("slow-pull", 1, "image_pull_slow"),
        ("stalled-pull-queued", 1, "image_pull_slow"),
        ("healthy", 0, "start_timeout"),
        ("readiness-failing", 2, "readiness_failed"),
        ("image-rate-limit", 3, "image_rate_limit"),
        ("unschedulable-cpu", 0, "unschedulable_resources"),
        ("image-not-found", 3, "image_not_found"),
    ],
)
def test_a_caller_that_waits_no_longer_still_learns_why(cause: str, number: int, becomes: str) -> None:
    found = overdue(at(cause, number))
    assert (found.state, found.failure) == ("failed", becomes)


def test_what_is_ready_or_stopping_is_never_overdue() -> None:
    ready = at("healthy", 2)
    assert overdue(ready) is ready


def replaced(data: Any, old: set[str], new: str) -> Any:
    """The same JSON with every message (of those) replaced."""
    if isinstance(data, dict):
        return {k: new if k == "message" and v in old else replaced(v, old, new) for k, v in data.items()}
    return [replaced(one, old, new) for one in data] if isinstance(data, list) else data


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        [
            *(
                (cause, "image_pull_failed")
                for cause in MEANING
                if cause.startswith(("image-regi", "image-au"))
            ),
            ("image-rate-limit", "image_pull_failed"),
            ("image-layer-cut", "image_pull_failed"),
            ("config-secret-missing", "container_config"),
            ("create-container-no-command", "container_create"),
            ("start-error-never", "start_failed"),
            ("start-error-always", "start_failed"),
            ("unschedulable-cpu", "unschedulable"),
            ("volume-secret-missing", "volume_failed"),
            ("ephemeral-storage-emptydir", "evicted_node_pressure"),
        ]
    ),
    st.text(alphabet="xyzwq " + string.digits[2:4], min_size=1, max_size=40),
)
def test_an_unknown_text_of_a_known_shape_is_a_guess_of_the_nearest_class(
    case: tuple[str, str], said: str
) -> None:
    cause, nearest = case
    stage = STAGES[cause][-1]
    spoken = {one["message"] for one in stage["events"] if one["type"] == "Warning"}
    status = stage["pod"]["status"]
    spoken |= {one["message"] for one in status.get("conditions", []) if one.get("message")}
    spoken |= {status["message"]} if "message" in status else set()
    for container in status.get("containerStatuses", []):
        for state in (container["state"], container["lastState"]):
            spoken |= {one["message"] for one in state.values() if "message" in one}
    found = at(
        cause, -1, pod=replaced(stage["pod"], spoken, said), events=replaced(stage["events"], spoken, said)
    )
    assert (found.failure, found.guess) == (nearest, True)
    assert (
        any(said.split() == one.text.rpartition(": ")[2].split() for one in found.evidence)
        or not said.strip()
    )


@pytest.mark.parametrize(
    ("cause", "number", "change", "nearest"),
    [
        ("config-secret-missing", 2, ("CreateContainerConfigError", "ErrImageWobble"), "image_pull_failed"),
        (
            "config-secret-missing",
            2,
            ("CreateContainerConfigError", "MountConfigWobbled"),
            "container_config",
        ),
        ("config-secret-missing", 2, ("CreateContainerConfigError", "WobbleError"), "container_create"),
        ("drained", 3, ("EvictionByEvictionAPI", "EvictionByWobble"), "drained"),
        ("out-of-cpu", 0, ("OutOfcpu", "OutOfexample.com/gpu"), "kubelet_rejected"),
        ("active-deadline", 3, ("DeadlineExceeded", "Wobbled"), "process_killed"),
        ("exit-at-once-never", 4, ('"Error"', '"Wobbled"'), "process_crashed"),
        ("exit-at-once-never", 4, ('"Error"', '"ContainerStatusUnknown"'), "node_lost"),
    ],
)
def test_an_unknown_reason_is_a_guess_of_the_nearest_class(
    cause: str, number: int, change: tuple[str, str], nearest: str
) -> None:
    pod = json.loads(json.dumps(STAGES[cause][number]["pod"]).replace(*change))
    found = at(cause, number, pod=pod, events=[])
    assert (found.failure, found.guess) == (nearest, True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 400), max_size=6))
def test_missing_fields_are_no_crash(case: tuple[str, int], dropped: list[int]) -> None:
    numbers = iter(range(10_000))

    def without(data: Any) -> Any:
        if isinstance(data, dict):
            return {k: without(v) for k, v in data.items() if next(numbers) not in dropped}
        return [without(one) for one in data] if isinstance(data, list) else data

    stage = STAGES[case[0]][case[1]]
    pod, events = without(stage["pod"]), without(stage["events"])
    try:
        found = classify(pod, events)
    except ConfigError:  # a condition without its type, a pod without its metadata
        return
    assert found.why


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        ({"kind": "Node", "metadata": {"name": "n"}}, "not a Pod: kind is 'Node'"),
        ({"kind": "Pod"}, "metadata"),
        (
            {"kind": "Pod", "metadata": {}, "status": {"conditions": [{"type": 1}]}},
            r"status.conditions\[0\].type",
        ),
    ],
)
def test_what_is_no_pod_is_refused_with_the_field(pod: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        classify(pod)


def test_the_least_that_can_be_a_pod_is_starting() -> None:
    assert classify({"metadata": {"name": "new"}}).why == "the scheduler has not seen it yet"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failed_image_volume_is_not_blamed_on_the_sandbox_s_image(number: int) -> None:
    found = at("image-volume-refused", number)
    assert found.why.startswith('image volume tools, image "localhost/nope-tools:1": ')
    pod = STAGES["image-volume-refused"][number]["pod"]
    unknown = {**pod, "spec": {**pod["spec"], "volumes": []}}
    if number > 1:  # before that only the events know of it, and they name no container
        found = at("image-volume-refused", number, pod=unknown)
        assert found.why.startswith('container sandbox or a volume of it, image "localhost/nope-tools:1": ')


def test_an_image_volume_that_came_after_all_is_not_blamed() -> None:
    stage = STAGES["image-volume-refused"][1]
    last = stage["events"][-1]
    pulled = {
        **last,
        "metadata": {**last["metadata"], "name": "z", "uid": "z"},
        "reason": "Pulled",
        "message": 'Successfully pulled image "localhost/nope-tools:1" in 1s',
        "involvedObject": {**last["involvedObject"], "fieldPath": None},
    }
    assert at("image-volume-refused", 1, events=[*stage["events"], pulled]).state == "starting"


def test_the_name_that_containerd_writes_out_is_the_container_s_own_image() -> None:
    text = 'failed to pull and unpack image "docker.io/library/python:latest": not found'
    stage = STAGES["image-volume-refused"][2]
    pod = json.loads(json.dumps(stage["pod"]))
    pod["spec"]["containers"][0]["image"] = "python"
    pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"] = text
    found = at("image-volume-refused", 2, pod=pod, events=[])
    assert (found.failure, found.why) == (
        "image_not_found", 'container sandbox, image "python": not found'
    )  # fmt: skip
