"""A turn is aborted, its process is killed, and another goes on with the rollout in the same pod."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from agent_flow.agents.state import AgentState
from sandbox_k8s import SandboxHandle

pytestmark = pytest.mark.timeout(300)  # images are made on the way

HERE = Path(__file__).parent


def call(command, thought="Next."):
    made = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{thought}\n<tool_call>\n{made}\n</tool_call>"


TURNS = [
    call(
        "cat answer.py; echo of this pod > ../kept; setsid sleep 600 >/dev/null 2>&1 & echo $! > ../sleeper"
    ),
    "No tool call here.",
    call("sed -i s/41/42/ answer.py && cat ../kept && kill -0 $(cat ../sleeper) && echo still asleep"),
    call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]


@pytest.fixture(
    params=[pytest.param("fake", marks=pytest.mark.slow), pytest.param("k8s", marks=pytest.mark.cluster)]
)
def section(request, why_not, tmp_path):
    """`[environment]`, which two processes share: the run's label and key."""
    if why := why_not(request.param):
        pytest.skip(why)
    need = request.getfixturevalue
    names = {"image": "example.com/any:1", "tools_image": "example.com/tools:1"}
    if request.param == "k8s":
        images = need("cluster_images")
        names = {"image": images.sandbox, "tools_image": images.tools}
        kubeconfig = os.environ["SANDBOX_K8S_KUBECONFIG"]
    else:
        kubeconfig = str(need("fake").kubeconfig)
    return names | {
        "provider": "k8s", "injection": "image_volume", "kubeconfig": kubeconfig,
        "run": f"af-{os.urandom(6).hex()}", "run_key_file": str(tmp_path / "run.key"), "cpu": 0.3,
        "memory_mib": 256, "disk_mib": 400, "image_pull_policy": "IfNotPresent",
    }  # fmt: skip


@pytest.fixture
def leg(section, tmp_path):
    """Runs a leg in a process of its own; gives what it ended with, and the exit code."""
    spec = importlib.util.spec_from_file_location("drive_of_pods", HERE.parent / "agents" / "drive.py")
    drive = sys.modules["drive_of_pods"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drive)
    folder = tmp_path / "bench"
    drive.Bench.prepare(folder, tmp_path, 'provider = "minisweagent"\nstep_limit = 6', TURNS)
    config = tomllib.loads((folder / "run.toml").read_text())
    (folder / "run.toml").write_text(tomli_w.dumps(config | {"environment": section}))

    def run(**begin):
        given, out = tmp_path / "given.json", tmp_path / "out.json"
        given.write_text(json.dumps(begin))
        out.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, str(HERE / "pod_leg.py"), str(folder), str(given), str(out)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert out.exists(), done.stderr[-3000:]
        return drive.Leg(**json.loads(out.read_text())), done.returncode

    return run


def told(leg):
    """The scaffold's history without the time of day."""
    return [
        {**message, "extra": {k: v for k, v in message.get("extra", {}).items() if k != "timestamp"}}
        for message in leg.messages
    ]


@pytest.mark.original("A-k8s-handle", "B-saved-state", "A-generate-resume-handle")
def test_a_cut_rollout_goes_on_in_another_process_against_the_same_pod(leg, section, left_in_cluster):
    whole, code = leg()
    assert (code, whole.exit_status) == (0, "Submitted")
    assert left_in_cluster(section["kubeconfig"], section["run"]) == []

    cut, code = leg(cut={"turn": 2, "tokens": 7})
    assert (code, cut.exit_status) == (-signal.SIGKILL, "Aborted")
    assert AgentState.from_bytes(cut.state.encode()).n_calls == 2
    pod = SandboxHandle.from_json(cut.handle).place.pod
    assert left_in_cluster(section["kubeconfig"], section["run"]) == [pod]

    rest, code = leg(
        cut={"turn": 2, "had": 7}, state=cut.state, conversation=cut.conversation, handle=cut.handle
    )
    assert (code, rest.exit_status) == (0, "Submitted")
    assert left_in_cluster(section["kubeconfig"], section["run"]) == []
    assert told(rest) == told(whole)
    printed = [message.get("extra", {}).get("raw_output") for message in rest.messages]
    assert "of this pod\nstill asleep\n" in printed
    assert rest.patch == whole.patch
    assert "+ANSWER = 42" in rest.patch
    # The turn that was cut stands in two pieces, each of its own weights; its tokens are the same.
    for name in ("ids", "mask", "prompt"):
        assert [sample[name] for sample in rest.samples] == [sample[name] for sample in whole.samples]
