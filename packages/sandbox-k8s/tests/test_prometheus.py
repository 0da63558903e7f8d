"""A client's counters in Prometheus's text format."""

import re
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import pytest
from sandbox_k8s import ClientStats, prometheus_text
from sandbox_k8s.kubernetes.failures import FAILURES
from sandbox_k8s.prometheus import _KNOWN

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
SAMPLE = re.compile(r'([a-z0-9_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (-?[0-9.]+)')
KINDS = ("counter", "gauge", "untyped")


def test_every_family_has_help_and_type_once_and_before_its_samples() -> None:
    text = prometheus_text(ClientStats(started=3, pod_ip=2, port_forward=1, loop_stall_s=0.25))
    assert text.endswith("\n")
    family = kind = ""
    seen: set[str] = set()
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in seen
            seen.add(family)
            kind = ""
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert (name, kind in KINDS) == (family, True)
        else:
            parsed = SAMPLE.fullmatch(line)
            assert parsed is not None, line
            assert parsed[1] == family
            assert (kind == "counter") == family.endswith("_total")
            samples[line.rpartition(" ")[0]] = float(parsed[3])
    assert samples["sandbox_k8s_started_total"] == 3
    assert samples['sandbox_k8s_connections_total{path="pod_ip"}'] == 2
    assert samples['sandbox_k8s_connections_total{path="port_forward"}'] == 1
    assert samples["sandbox_k8s_loop_stall_seconds"] == 0.25
    assert len(samples) == len(ClientStats.__struct_fields__)


@pytest.mark.skipif(not OPERATIONS.exists(), reason="the package is tested without its repository")
def test_every_number_and_every_failure_class_is_written_down() -> None:
    page = OPERATIONS.read_text(encoding="utf-8")
    said = page.split("### What the numbers of sandboxes mean")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in said.splitlines() if line.startswith("| `")]
    numbers = [name for cell in cells for name in re.findall(r"`([a-z_]+)[`{]", cell)]
    families = re.findall(r"^# TYPE sandbox_k8s_([a-z_]+) ", prometheus_text(ClientStats()), re.MULTILINE)
    assert sorted(numbers) == sorted(families)
    said = page.split("### What fails, and what to do")[1].split("\n### ")[0]
    assert f" {len(FAILURES)} classes," in said
    rows = [line.split("|")[2] for line in said.splitlines() if line.startswith("| ")]
    classes = [name for row in rows for name in re.findall(r"`([a-z_*]+)`", row)]
    known = [name if name[0] != "_" else f"image_registry{name}" for name in classes]
    assert [name for name in FAILURES if not any(fnmatch(name, one) for one in known)] == []
    assert [one for one in known if not any(fnmatch(name, one) for name in FAILURES)] == []


def test_labels_are_on_every_sample_and_escaped() -> None:
    text = prometheus_text(ClientStats(), {"run": 'a"b\\c\nd'})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('run="a\\"b\\\\c\\nd"' in line for line in lines)
    assert all(SAMPLE.fullmatch(line) for line in lines)


def test_a_counter_without_a_text_is_shown_all_the_same() -> None:
    class Newer(ClientStats):
        invented: int = 7

    assert "# TYPE sandbox_k8s_invented untyped\nsandbox_k8s_invented 7\n" in prometheus_text(Newer())
    assert _KNOWN.keys() <= set(msgspec.structs.asdict(ClientStats()))
