"""Samples from one process to another: the bridge against raw ZeroMQ multipart, run side by side.

    python benchmarks/trainer_bridge.py [--quick] [--tokens 32768] [--pairs 15] [--seconds 0.6]

One pair is one run of each, seconds apart, in alternating order; a ratio is bridge / raw of one pair.
Machines are shared and noisy: read the median and the quartiles, not one figure.
`raw` is PUSH/PULL multipart of the
four arrays without codec, hash or acknowledgement (the baseline of the project's bars). `bridge` is
`SampleSender.send` to `SampleReceiver.next` and `commit`: copy, hash, ids, checks of every sample,
acknowledgements up to committed, no spool. `spool` is the same with durability `async`. Rates are taken at
the consumer, from the first timed sample to the last.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder's scripts are named like the packages they measure, and would be imported in their place.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import zmq
from token_tracking.sample import Sample
from trainer_bridge import ReceiverConfig, SampleReceiver, SampleSender
from trainer_bridge.testing import make_sample

POOL = 16
WARM = 16


def raw_receive(pipe: Connection, count: int) -> None:
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.set_hwm(64)
    pipe.send(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    begin = cpu = 0.0
    for n in range(WARM + count):
        if n == WARM:
            begin, cpu = time.perf_counter(), time.process_time()
        frames = pull.recv_multipart(copy=False)
        ids = np.frombuffer(frames[1].buffer, np.int32)
        assert len(ids)
    pipe.send((time.perf_counter() - begin, time.process_time() - cpu))
    pull.close(0)
    context.term()


def raw_send(address: str, samples: list[Sample], spool: Path | None) -> None:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.set_hwm(64)
    push.connect(address)
    for s in samples:
        push.send_multipart([b"h" * 64, s.token_ids, s.loss_mask, s.logprobs, s.versions], copy=False)
    push.close(10_000)
    context.term()


def bridge_receive(pipe: Connection, count: int) -> None:
    with SampleReceiver(config=ReceiverConfig(queue_messages=1024)) as receiver:
        pipe.send(receiver.address)
        begin = cpu = 0.0
        for n in range(WARM + count):
            if n == WARM:
                begin, cpu = time.perf_counter(), time.process_time()
            lease = receiver.next(30.0)
            assert lease is not None
            assert len(lease.samples[0])
            lease.commit()
        pipe.send((time.perf_counter() - begin, time.process_time() - cpu))
        pipe.recv()


def bridge_send(address: str, samples: list[Sample], spool: Path | None) -> None:
    with SampleSender(address, spool=spool) as sender:
        for sample in samples:
            sender.send(sample)
        assert sender.wait_settled(30.0)


def stream_of(samples: list[Sample], count: int) -> list[Sample]:
    """As many samples as are sent, each under an id of its own (a rollout that was seen is dropped)."""
    return [msgspec.structs.replace(samples[n % POOL], rollout_id=f"{n:032x}") for n in range(WARM + count)]


VARIANTS = {
    "raw": (raw_receive, raw_send),
    "bridge": (bridge_receive, bridge_send),
    "spool": (bridge_receive, bridge_send),
}


def run(name: str, samples: list[Sample], count: int) -> dict[str, float]:
    receive, send = VARIANTS[name]
    stream = stream_of(samples, count)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=receive, args=(there, count), daemon=True)
    process.start()
    address = here.recv()
    cpu = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        send(address, stream, Path(folder) if name == "spool" else None)
        sent_cpu = time.process_time() - cpu
        seconds, received_cpu = here.recv()
    here.send(None)
    process.join()
    return {
        "rate": count / seconds,
        "send_us": sent_cpu / (count + WARM) * 1e6,
        "receive_us": received_cpu / count * 1e6,
    }


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="9 pairs of short runs, under 30 s")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one run, about")
    args = parser.parse_args()
    pairs, seconds = (9, 0.25) if args.quick else (args.pairs, args.seconds)
    samples = [make_sample(n, tokens=args.tokens) for n in range(POOL)]
    names = list(VARIANTS)
    counts = {name: max(64, int(run(name, samples, 64)["rate"] * seconds)) for name in names}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            results[name].append(run(name, samples, counts[name]))
    report = {
        "benchmark": "trainer_bridge",
        "tokens": args.tokens,
        "payload_bytes": sum(
            a.nbytes
            for a in (samples[0].token_ids, samples[0].loss_mask, samples[0].logprobs, samples[0].versions)
        ),
        "pairs": pairs,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "samples_per_s": {name: quartiles([r["rate"] for r in results[name]]) for name in names},
        "cpu_us_per_sample": {
            name: {side: round(min(r[side] for r in results[name]), 1) for side in ("send_us", "receive_us")}
            for name in names
        },
        "ratio_to_raw": {
            name: quartiles(
                [ours["rate"] / raw["rate"] for ours, raw in zip(results[name], results["raw"], strict=True)]
            )
            for name in names[1:]
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
