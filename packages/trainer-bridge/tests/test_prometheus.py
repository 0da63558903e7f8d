"""The metrics endpoint, scraped as Prometheus does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from trainer_bridge import (
    AddressError,
    ReceiverConfig,
    SampleObserver,
    SampleReceiver,
    SampleSender,
    Timing,
)
from trainer_bridge.prometheus import HELP, PrometheusExporter
from trainer_bridge.testing import make_rollout, make_sample

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
LINE = re.compile(r'^(trainer_bridge_[a-z0-9_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+\})? (-?[0-9.e+-]+|NaN)$')


def scrape(url: str) -> dict[str, float]:
    """Series -> value; every line is checked against the text format."""
    with urllib.request.urlopen(url, timeout=50) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    assert text.endswith("\n")
    found: dict[str, float] = {}
    typed: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            typed[name] = kind
        elif not line.startswith("# HELP "):
            match = LINE.match(line)
            assert match is not None, line
            name = match[1]
            assert typed[name] == ("counter" if name.endswith("_total") else "gauge")
            assert name.removeprefix("trainer_bridge_") in HELP
            found[name.removeprefix("trainer_bridge_") + (match[2] or "")] = float(match[3])
    return found


@pytest.fixture
def receiver() -> Iterator[SampleReceiver]:
    with SampleReceiver(config=ReceiverConfig(max_nacks=0)) as opened:
        yield opened


def test_a_scrape_tells_what_became_of_every_rollout(receiver: SampleReceiver) -> None:
    with (
        PrometheusExporter(receiver) as exporter,
        SampleSender(receiver.address, producer='w"1\n\\') as sender,
    ):
        assert scrape(exporter.url)["rollouts_received_total"] == 0
        for n in range(4):
            sender.send(make_rollout(n, parts=2))
        leases = [receiver.next(40.0) for _ in range(3)]
        assert leases[0] is not None
        assert leases[1] is not None
        leases[0].commit()
        leases[1].nack("no use")
        got = scrape(exporter.url)
        assert got["rollouts_received_total"] == 4
        assert got["samples_received_total"] == 8
        assert got["rollouts_committed_total"] == 1
        assert got['rollouts_dropped_total{reason="nacked"}'] == 1
        assert (got["leased"], got["queued"], got["unaccounted"]) == (1, 1, 0)
        assert got["tokens_trained_total"] == sum(s.trained_tokens for s in make_rollout(0, parts=2))
        label = f'{{producer="{sender.stats().producer[:8]}",name="w\\"1\\n\\\\"}}'
        assert got[f"producer_messages_total{label}"] == 4
        assert got[f"producer_connected{label}"] == 1
        sender.close(drain_s=0.0)


def test_other_paths_and_a_closed_receiver(receiver: SampleReceiver) -> None:
    with PrometheusExporter(receiver) as exporter:
        with pytest.raises(HTTPError, match="404"):
            scrape(exporter.url.replace("/metrics", "/"))
        receiver.close()
        assert scrape(exporter.url)["producers_connected"] == 0


def test_addresses(receiver: SampleReceiver) -> None:
    for bind in ("9108", "localhost", "http://127.0.0.1:1", "127.0.0.1:x"):
        with pytest.raises(AddressError, match="write HOST:PORT"):
            PrometheusExporter(receiver, bind)
    with pytest.raises(AddressError, match="other machines could read"):
        PrometheusExporter(receiver, "0.0.0.0:0")
    with PrometheusExporter(receiver) as exporter:
        taken = exporter.url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(AddressError, match="give another port"):
            PrometheusExporter(receiver, taken)


def test_receive_serves_metrics(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer_bridge", "receive", "--json", "--metrics", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            with SampleSender(first["address"]) as sender:
                sender.send(make_sample(1))
                assert sender.wait_settled(40.0)
            assert scrape(first["metrics"])["rollouts_committed_total"] == 1
        finally:
            process.terminate()
            process.wait(40.0)
    assert process.returncode == 0


@pytest.mark.skipif(not OPERATIONS.exists(), reason="the package is tested without its repository")
def test_every_number_has_one_name_and_is_written_down(tmp_path: Path) -> None:
    """`groups_incomplete`, which operations.md says to look at, was in Prometheus alone."""
    said = OPERATIONS.read_text().split("**What the numbers mean.**")[1].split("**What `tail` shows")[0]
    first_cells = [line.split("|")[1] for line in said.splitlines() if line.startswith("| `")]
    documented = {name for cell in first_cells for name in re.findall(r"`([a-z_]+)`", cell)}
    config = ReceiverConfig(max_nacks=0, timing=Timing(heartbeat_s=0.05))
    with (
        SampleReceiver(out=tmp_path, config=config) as receiver,
        SampleObserver(receiver.address, timing=config.timing) as observer,
        SampleSender(receiver.address) as sender,
        PrometheusExporter(receiver) as exporter,
    ):
        sender.send(make_sample(1))
        lease = receiver.next(40.0)
        assert lease is not None
        lease.nack("no use")
        while observer.status is None or "dropped_nacked_total" not in observer.status.metrics:
            observer.next(0.05)
        metrics = receiver.metrics()
        exported = {series.split("{")[0] for series in scrape(exporter.url)} | {"rejected_total"}
        assert observer.status.metrics.keys() == metrics.keys()
        sender.close(drain_s=0.0)
    of_a_worker = {name for name in documented if name.startswith("producer_")}
    assert metrics.keys() - {"dropped_nacked_total"} == documented - of_a_worker
    assert exported == documented
    assert HELP.keys() == documented
    assert (metrics["stored"], metrics["observers"], metrics["groups_incomplete"]) == (1, 1, 0)
