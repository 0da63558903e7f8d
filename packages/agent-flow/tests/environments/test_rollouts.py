"""Whole rollouts of the quickstart in pods, containers and E2B: agent's sandbox, patch, grader's sandbox."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import tomli_w

pytestmark = pytest.mark.timeout(300)  # images are made on the way
TASKS = ("spanset-14",)


@pytest.fixture(
    params=["fake", "docker", "e2b", pytest.param("k8s", marks=pytest.mark.cluster)], scope="module"
)
def section(request, why_not, tmp_path_factory, testbed):
    """`[environment]` of a place, and what looks at its sandboxes afterwards."""
    if why := why_not(request.param):
        pytest.skip(why)
    need = request.getfixturevalue
    if request.param == "docker":
        return {"provider": "docker", "image": need("python_container_image"), "pull": "never"}
    run = f"af-{os.urandom(6).hex()}"
    if request.param == "e2b":
        return {"provider": "e2b", "env": {"RUN": run}, **need("e2b_server").config}
    made = {
        "provider": "k8s", "injection": "image_volume", "run": run, "cpu": 0.5, "memory_mib": 512,
        "run_key_file": str(tmp_path_factory.mktemp("key") / "run.key"), "image_pull_policy": "IfNotPresent",
    }  # fmt: skip
    if request.param == "fake":
        names = {"image": "example.com/any:1", "tools_image": "example.com/tools:1"}
        return made | names | {"kubeconfig": str(need("fake").kubeconfig)}
    return made | {
        "image": need("python_cluster_image"),
        "tools_image": need("cluster_tools"),
        "kubeconfig": os.environ["SANDBOX_K8S_KUBECONFIG"],
    }


@pytest.fixture(scope="module")
def finished(section, cli, example, tmp_path_factory):
    """One run of the command, of some tasks of the example."""
    import tomllib

    folder = tmp_path_factory.mktemp("run")
    rows = [json.loads(line) for line in (example / "tasks.jsonl").read_text().splitlines()]
    chosen = [row for row in rows if row["instance_id"] in TASKS]
    assert len(chosen) == len(TASKS)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    config = tomllib.loads((example / "run.toml").read_text())
    config |= {"base": str(example), "environment": section}
    config["tasks"]["path"] = str(folder / "tasks.jsonl")
    (folder / "run.toml").write_text(tomli_w.dumps(config))
    return cli("run", folder / "run.toml", "--json", cwd=folder)


@pytest.mark.original("A-own-face", "A-docker", "A-k8s")
def test_the_rollout_is_graded_as_the_example_says(finished, example):
    assert finished.code == 0, finished.stdout + finished.stderr
    expected = json.loads((example / "expected.json").read_text())
    wanted = {name: expected["recordings"][name]["reward"] for name in TASKS}
    assert finished.summary["rewards"] == wanted


def test_its_files_say_where_it_ran(finished, section):
    (folder,) = [path for path in (finished.folder / "rollouts").iterdir() if path.is_dir()]
    provenance = json.loads((folder / "provenance.json").read_text())
    values = provenance["produced_by"]
    assert values["environment"] == section["provider"]
    assert values["environment_image"] == section.get("image", section.get("template"))
    assert len(values["base_commit"]) == 40
    assert (values["base_dirty"], values["surface_tests"], values["surface_configuration"]) == (0, 0, 0)
    assert (folder / "patch.diff").read_bytes().startswith(b"diff --git ")


def test_no_key_is_in_any_file(finished, section):
    if section["provider"] != "e2b":
        pytest.skip("there is a key in no other section")
    key = Path(section["api_key_file"]).read_bytes().strip()
    files = [path for path in finished.folder.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if key in path.read_bytes()] == []
    assert key.decode() not in finished.stdout + finished.stderr


def test_no_sandbox_is_left(finished, section, left_in_cluster, request):
    if section["provider"] == "e2b":
        seen = request.getfixturevalue("e2b_server").tell("look")["sandboxes"].values()
        assert [one for one in seen if one["body"]["envVars"].get("RUN") == section["env"]["RUN"]] == []
    elif section["provider"] == "docker":
        program = (
            subprocess.run(
                ["sh", "-c", "docker ps -q >/dev/null 2>&1 && echo docker || echo podman"],
                capture_output=True,
            )
            .stdout.decode()
            .strip()
        )
        listed = [program, "ps", "-aq", "--filter", "label=agent-flow.run"]
        assert subprocess.run(listed, capture_output=True, check=True).stdout == b""
    else:
        assert left_in_cluster(section["kubeconfig"], section["run"]) == []
