"""``sandbox-k8s explain`` on what kubectl prints."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s.cli import main

FOLDER = Path(__file__).parent / "recordings"


def stage(cause: str, number: int = -1) -> dict[str, Any]:
    return json.loads((FOLDER / f"{cause}.json").read_text(encoding="utf-8"))["stages"][number]


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(name: str, data: Any) -> str:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return str(path)

    return write


def test_a_failure_for_people(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seen = stage("volume-secret-missing")
    events = written("events.json", {"kind": "EventList", "items": seen["events"]})
    assert main(["explain", written("pod.json", seen["pod"]), "--events", events]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "pod default/volume-secret-missing  failed: volume_missing"
    assert {line.split()[0] for line in out.splitlines()[1:] if line[2] != " "} == {
        "what", "seen", "fault", "do", "evidence",
    }  # fmt: skip
    assert 'secret "nope" not found' in out
    assert max(map(len, out.splitlines())) <= 110


def test_without_events_it_says_what_would_help(
    written: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = stage("volume-secret-missing")["pod"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(pod).encode())))
    assert main(["explain", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("pod default/volume-secret-missing  starting\n")
    assert "kubectl get events" in out


def test_a_list_of_pods_and_their_node(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lost, taint = stage("node-lost", 3), stage("unschedulable-taint", 0)
    pods = written(
        "pods.json", {"kind": "List", "items": [lost["pod"], taint["pod"], stage("healthy")["pod"]]}
    )
    events = written("events.json", {"kind": "List", "items": lost["events"] + taint["events"]})
    assert main(["explain", pods, "--events", events, "--node", written("node.json", lost["node"])]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pod ")]
    assert heads == [
        "pod default/node-lost  failing: node_lost",
        "pod default/unschedulable-taint  failing: unschedulable_nodes_down",
        "pod default/healthy  failing: node_lost",
    ]


def test_a_guess_says_so_and_a_repeated_text_is_shown_once(
    written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", written("pod.json", stage("liveness-failing-never")["pod"])]) == 0
    assert "process_killed (a guess)" in capsys.readouterr().out
    seen = stage("start-error-never")
    events = written("events.json", {"kind": "List", "items": seen["events"]})
    assert main(["explain", written("pod.json", seen["pod"]), "--events", events]) == 0
    assert "event Failed (main): the same" in capsys.readouterr().out


def test_what_a_container_wrote_cannot_control_the_terminal(
    written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = stage("exit-at-once-never")["pod"]
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = "\x1b]0;owned\x07 \u202e boom"
    assert main(["explain", written("pod.json", pod)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07 \\x202e boom" in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        ("", "is not the JSON of an object"),
        ("[]", "is not the JSON of an object"),
        ({"kind": "Service", "metadata": {"name": "s"}}, "not a Pod: kind is 'Service'"),
        ({"kind": "List", "items": [3]}, "is not a list of objects"),
    ],
)
def test_a_file_that_holds_something_else_is_one_line_and_exit_code_2(
    written: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any, says: str
) -> None:
    path = str(tmp_path / "none.json") if content is None else written("pod.json", content)
    assert main(["explain", path]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
