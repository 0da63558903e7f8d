"""Samples from one process to another: the bridge against other ways of moving them, run side by side.

    python benchmarks/trainer_bridge.py [--quick] [--pairs 15] [--seconds 0.6] [--folder DIR]

Every round runs each way once, in alternating order; a ratio compares runs of one round, seconds apart.
Machines are shared and noisy: read the median and the quartiles, not one figure. Rates are taken at the
consumer, from the first sample after the warm-up to the last; CPU is process time, all threads, the least
over the rounds.

    raw            PUSH/PULL, the four arrays as frames; no codec, hash or acknowledgement (the baseline)
    lists          PUSH/PULL, msgspec Struct of lists, as prime-rl does; the producer holds lists, the
                   consumer makes arrays of them
    lists_kept     the same, left as lists
    pickle         PUSH/PULL, the arrays in one pickle
    transferqueue  PUSH/PULL, TransferQueue's own serializer, if it is installed
    codec          PUSH/PULL, our frames: copy, hash, checks of every sample; no acknowledgement
    bridge         SampleSender.send_group to SampleReceiver.next_batch and commit, as trainers work: groups
                   of 8 rollouts, steps of 4 groups; all that, and acknowledgements
    bridge_single  SampleSender.send to SampleReceiver.next and commit, one rollout at a time
    curve          the same as bridge, encrypted, with an allow-list
    spool_async    the same as bridge, with a spool (`async`, `sync`)
    spool_sync

`spool_vs_sqlite` is the outbox alone: messages taken into a spool (`async`) against the same bytes put into
sqlite (WAL, synchronous=NORMAL, a commit every 32). The last line of the output is one JSON object with the
headline ratios; a figure that could not be taken is null.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder's scripts are named like the packages they measure, and would be imported in their place.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from token_tracking.sample import Sample
from trainer_bridge import CurveKeys, ReceiverConfig, SampleReceiver, SampleSender, SenderConfig
from trainer_bridge.clock import SystemClock
from trainer_bridge.codec import Draft, decode_frames, draft
from trainer_bridge.keys import SecretKey
from trainer_bridge.outbox import SpoolOutbox
from trainer_bridge.seqset import SeqSet
from trainer_bridge.testing import make_sample
from trainer_bridge.zmq_auth import new_keypair

POOL = 16
WARM = 384
"""Samples before the timed ones, at most: both ends' memory has been in use once by then."""
HIGH_WATER = 64
"""Messages that raw sockets queue at each end; UNSETTLED is the bridge's bound, to the commit and back."""
UNSETTLED = 256
GROUP, STEP = 8, 4
"""Rollouts of a group, groups of a step."""
SPOOLED = 96
"""Messages of one spool or sqlite run."""
HEADLINES = {
    "vs_raw_32k": (32768, "bridge", "raw"),
    "vs_raw_4k": (4096, "bridge", "raw"),
    "vs_raw_32k_single": (32768, "bridge_single", "raw"),
    "vs_raw_4k_single": (4096, "bridge_single", "raw"),
    "vs_lists_32k": (32768, "bridge", "lists"),
    "vs_lists_kept_32k": (32768, "bridge", "lists_kept"),
    "vs_pickle_32k": (32768, "bridge", "pickle"),
    "vs_transferqueue_32k": (32768, "bridge", "transferqueue"),
    "acks_vs_none_32k": (32768, "bridge", "codec"),
    "acks_vs_none_4k": (4096, "bridge", "codec"),
    "curve_vs_plain": (32768, "curve", "bridge"),
    "spool_async_vs_none": (32768, "spool_async", "bridge"),
    "spool_sync_vs_none": (32768, "spool_sync", "bridge"),
}

Frames = Sequence[Any]


class Lists(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]


class Way(NamedTuple):
    """How a sample becomes frames and frames a sample, over PUSH/PULL."""

    prepare: Callable[[Sample], Any]
    """What the producer already holds; not timed."""
    encode: Callable[[Any], Frames]
    decode: Callable[[Sequence[zmq.Frame]], object]


def arrays_of(sample: Sample) -> tuple[np.ndarray, ...]:
    return sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions


def lists_of(s: Sample) -> Lists:
    return Lists(
        s.token_ids.tolist(), s.loss_mask.astype(bool).tolist(), s.logprobs.tolist(), s.versions.tolist()
    )


def frames_of(sample: Sample) -> Frames:
    return draft([sample]).numbered(b"p" * 16, 1, 1, 0)


def arrays_from(frames: Sequence[zmq.Frame]) -> object:
    got = DECODER.decode(frames[0].buffer)
    return (
        np.array(got.ids, np.int32),
        np.array(got.mask, np.uint8),
        np.array(got.logprobs, np.float32),
        np.array(got.versions, np.int32),
    )


def unpickle(frames: Sequence[zmq.Frame]) -> object:
    return pickle.loads(frames[0].buffer)  # noqa: S301 - what others do, between two processes of this script


def transfer_queue() -> Way | None:
    try:
        serial = importlib.import_module("transfer_queue.utils.serial_utils")
    except ImportError:
        return None
    fields = ("ids", "mask", "logprobs", "versions")
    return Way(
        arrays_of,
        lambda arrays: serial.encode({"request_type": "PUT", "body": dict(zip(fields, arrays, strict=True))}),
        lambda frames: serial.decode([frame.buffer for frame in frames])["body"],
    )


ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Lists)
WAYS: dict[str, Way | None] = {
    "raw": Way(
        arrays_of, lambda a: (b"h" * 64, *a), lambda frames: [np.frombuffer(f.buffer, "u1") for f in frames]
    ),
    "lists": Way(lists_of, lambda lists: (ENCODER.encode(lists),), arrays_from),
    "lists_kept": Way(
        lists_of, lambda lists: (ENCODER.encode(lists),), lambda frames: DECODER.decode(frames[0].buffer)
    ),
    "pickle": Way(arrays_of, lambda arrays: (pickle.dumps(arrays, 5),), unpickle),
    "transferqueue": transfer_queue(),
    "codec": Way(lambda sample: sample, frames_of, lambda f: decode_frames([f[0].bytes, f[1].buffer])),
}
BRIDGES = ("bridge", "bridge_single", "curve", "spool_async", "spool_sync")


class Job(NamedTuple):
    name: str
    samples: list[Sample]
    count: int
    warm: int
    folder: Path
    server_keys: CurveKeys
    client_keys: CurveKeys


def receive(job: Job, pipe: Connection) -> None:
    way = WAYS.get(job.name)
    assert way is not None
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.set_hwm(HIGH_WATER)
    pipe.send(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    begin = cpu = 0.0
    for n in range(job.warm + job.count):
        if n == job.warm:
            begin, cpu = time.perf_counter(), time.process_time()
        way.decode(pull.recv_multipart(copy=False))
    pipe.send((time.perf_counter() - begin, time.process_time() - cpu))
    pull.close(0)
    context.term()


def send(job: Job, address: str) -> float:
    way = WAYS[job.name]
    assert way is not None
    held = [way.prepare(sample) for sample in job.samples]
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.set_hwm(HIGH_WATER)
    push.connect(address)
    cpu = time.process_time()
    for n in range(job.warm + job.count):
        push.send_multipart(way.encode(held[n % POOL]), copy=False)
    push.close(10_000)
    context.term()
    return time.process_time() - cpu


def receive_by_bridge(job: Job, pipe: Connection) -> None:
    keys = job.server_keys if job.name == "curve" else None
    with SampleReceiver(config=ReceiverConfig(), keys=keys) as receiver:
        pipe.send(receiver.address)
        begin = cpu = 0.0
        taken = 0
        while taken < job.warm + job.count:
            if taken == job.warm:
                begin, cpu = time.perf_counter(), time.process_time()
            lease = (
                receiver.next(30.0)
                if job.name == "bridge_single"
                else receiver.next_batch(groups=STEP, deadline_s=30.0)
            )
            assert lease is not None
            assert len(lease.samples[0])
            taken += len(lease.samples)
            lease.commit()
        pipe.send((time.perf_counter() - begin, time.process_time() - cpu))
        pipe.recv()


def send_by_bridge(job: Job, address: str) -> float:
    # A rollout that was seen is dropped: each sample gets an id of its own.
    stream = [
        msgspec.structs.replace(job.samples[n % POOL], rollout_id=f"{n:032x}", group_id=f"{n // GROUP:032x}")
        for n in range(job.warm + job.count)
    ]
    options: dict[str, Any] = {
        "keys": job.client_keys if job.name == "curve" else None,
        "config": SenderConfig(max_unsettled=UNSETTLED),
    }
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        if job.name.startswith("spool"):
            options |= {"spool": folder, "durability": job.name.removeprefix("spool_")}
        cpu = time.process_time()
        with SampleSender(address, **options) as sender:
            if job.name == "bridge_single":
                for sample in stream:
                    sender.send(sample)
            else:
                for first in range(0, len(stream), GROUP):
                    sender.send_group(stream[first : first + GROUP])
            assert sender.wait_settled(30.0)
            return time.process_time() - cpu


def run(job: Job) -> dict[str, float]:
    """One way once: samples per second at the consumer, and CPU per sample at each end."""
    here, there = multiprocessing.Pipe()
    bridged = job.name in BRIDGES
    process = multiprocessing.get_context("fork").Process(
        target=receive_by_bridge if bridged else receive, args=(job, there), daemon=True
    )
    process.start()
    sent_cpu = (send_by_bridge if bridged else send)(job, here.recv())
    seconds, received_cpu = here.recv()
    here.send(None)
    process.join()
    return {
        "rate": job.count / seconds,
        "send_us": sent_cpu / (job.warm + job.count) * 1e6,
        "receive_us": received_cpu / job.count * 1e6,
    }


def run_spool(drafts: list[Draft], folder: Path) -> float:
    """Messages per second into an outbox, all of them asked of the disk at the end."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        box = SpoolOutbox(Path(root), durability="async", config=SenderConfig(), clock=SystemClock())
        begin = time.perf_counter()
        for n in range(SPOOLED):
            box.append(drafts[n % POOL].numbered(box.producer, 1, n + 1, 0))
        box.close(SeqSet())
        return SPOOLED / (time.perf_counter() - begin)


def run_sqlite(drafts: list[Draft], folder: Path) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as root:
        base = sqlite3.connect(f"{root}/queue.db", isolation_level=None)
        for line in (
            "pragma journal_mode=wal",
            "pragma synchronous=normal",
            "create table queue(seq integer primary key, head blob, payload blob)",
            "begin",
        ):
            base.execute(line)
        begin = time.perf_counter()
        for n in range(SPOOLED):
            frames = drafts[n % POOL].numbered(b"p" * 16, 1, n + 1, 0)
            base.execute("insert into queue values(?,?,?)", (n + 1, *frames))
            if n % 32 == 31:
                base.execute("commit")
                base.execute("begin")
        base.execute("commit")
        base.close()
        return SPOOLED / (time.perf_counter() - begin)


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def measure(
    tokens: int, names: Sequence[str], job: Job, pairs: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    job = job._replace(samples=[make_sample(n, tokens=tokens) for n in range(POOL)])
    step = GROUP * STEP
    rates = {name: run(job._replace(name=name, count=step, warm=step))["rate"] for name in names}
    counts = {name: max(1, int(rate * seconds / step)) * step for name, rate in rates.items()}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            warm = min(counts[name], WARM) // step * step
            results[name].append(run(job._replace(name=name, count=counts[name], warm=warm)))
    return results


def show(tokens: int, results: dict[str, list[dict[str, float]]]) -> None:
    base = [r["rate"] for r in results["raw"]]
    for name, rounds in results.items():
        line = {
            "tokens": tokens,
            "way": name,
            "samples_per_s": quartiles([r["rate"] for r in rounds]),
            "vs_raw": ratios([r["rate"] for r in rounds], base),
            **{f"cpu_{side}": round(min(r[side] for r in rounds), 1) for side in ("send_us", "receive_us")},
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="9 rounds of short runs, under 50 s")
    parser.add_argument("--pairs", type=int, default=15, help="rounds (at least 9)")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one run, about")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="spools go here")
    args = parser.parse_args()
    pairs, seconds = (9, 0.07) if args.quick else (max(args.pairs, 9), args.seconds)
    logging.disable(logging.WARNING)
    public, secret = new_keypair()
    key, hidden = new_keypair()
    job = Job(
        name="",
        samples=[],
        count=0,
        warm=8,
        folder=args.folder,
        server_keys=CurveKeys(public=public, secret=SecretKey(secret), peers={"worker": key}),
        client_keys=CurveKeys(public=key, secret=SecretKey(hidden), peers={"receiver": public}),
    )
    here = [name for name in (*WAYS, *BRIDGES) if name in BRIDGES or WAYS[name] is not None]
    results = {
        32768: measure(32768, here, job, pairs, seconds),
        4096: measure(4096, ["raw", "codec", "bridge", "bridge_single"], job, pairs, seconds),
    }
    drafts = [draft([make_sample(n, tokens=32768)]) for n in range(POOL)]
    spool = [(run_spool(drafts, args.folder), run_sqlite(drafts, args.folder)) for _ in range(pairs)]
    for tokens, found in results.items():
        show(tokens, found)
    headlines: dict[str, dict[str, float] | None] = {
        "spool_vs_sqlite": ratios([ours for ours, _ in spool], [theirs for _, theirs in spool])
    }
    for headline, (tokens, ours, theirs) in HEADLINES.items():
        rounds = results[tokens]
        headlines[headline] = (
            ratios([r["rate"] for r in rounds[ours]], [r["rate"] for r in rounds[theirs]])
            if theirs in rounds
            else None
        )
    print(json.dumps({"quartiles": headlines, "pairs": pairs, "cores": os.cpu_count()}))
    print(json.dumps({name: each["median"] if each else None for name, each in headlines.items()}))


if __name__ == "__main__":
    main()
