"""Reading SGLang's stream: recorded answers, and what cannot be true."""

import copy
import json

import numpy as np
import pytest
from agent_flow.engines.sglang_stream import Answer, EventReader, decode_chunk, records_of
from agent_flow.engines.version import VersionReader
from agent_flow.errors import EngineError
from token_tracking.sample import UNKNOWN_VERSION

RID = "9" * 32


def read_all(events, request, *, before=None, kept=False):
    """An answer from events, as the client reads it."""
    answer = Answer(request.rid, len(request.prompt_ids), kept_sets=kept, version_before=before)
    for event in events:
        chunk = decode_chunk(json.dumps(event).encode())
        answer.add(chunk.meta_info, chunk.output_ids)
    return answer


def records(answer, request, run="run-a"):
    return records_of(answer, request, "processed", VersionReader(run).read)


def final(events):
    """Output ids and log-probabilities by the server's own count, whichever kind of stream it was."""
    ids, rows = [], []
    for event in events:
        new = event["meta_info"]["completion_tokens"] - len(ids)
        ids += event["output_ids"][-new:] if new else []
        rows += event["meta_info"]["output_token_logprobs"][-new:] if new else []
    return ids, [row[0] for row in rows]


@pytest.fixture
def ask(recording, make_request):
    """`ask(name)`: a recording's events, and the request that it answers."""

    def load(name, **options):
        events = recording(name)
        return events, make_request(100, rid=events[0]["meta_info"]["id"], **options)

    return load


@pytest.mark.parametrize(
    ("name", "tokens", "finish"),
    [
        ("length_cumulative", 3, "length"),
        ("length_incremental", 5, "length"),
        ("abort_cumulative", 23, "abort"),
        ("abort_incremental", 17, "abort"),
        ("retract_abort_cumulative", 25, "abort"),
        ("retract_abort_incremental", 9, "abort"),
    ],
)
def test_recorded_answers(ask, name, tokens, finish):
    events, request = ask(name)
    (record,) = records(read_all(events, request), request)
    ids, logprobs = final(events)
    assert record.output_ids.tolist() == ids
    assert np.array_equal(record.logprobs, np.array(logprobs, np.float32))
    assert (len(ids), record.finish_reason) == (tokens, finish)


def test_a_recorded_stop(recording, make_request):
    answer = recording.answer("gen_stop_token")
    request = make_request(8, rid=answer["meta_info"]["id"], temperature=0, stop_ids=[134159])
    (record,) = records(read_all([answer], request), request)
    assert record.output_ids.tolist() == [198, 198, 134159]
    assert (record.finish_reason, record.stop_id) == ("stop", 134159)


@pytest.mark.original("A-weight-version")
@pytest.mark.parametrize(("name", "where"), [("spans_cumulative", 24), ("spans_incremental", 11)])
def test_new_weights_in_mid_answer_are_two_records(ask, name, where):
    events, request = ask(name)
    first, second = records(read_all(events, request), request)
    ids, _ = final(events)
    assert (first.weight_version, second.weight_version) == (UNKNOWN_VERSION, 2)  # "default", then run-a/2
    assert first.output_ids.tolist() == ids[:where]
    assert second.output_ids.tolist() == ids[where:]
    assert second.prompt_ids.tolist() == request.prompt_ids.tolist() + ids[:where]
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")


@pytest.mark.parametrize("name", ["kept_cumulative", "kept_incremental"])
def test_recorded_kept_sets(ask, name):
    events, request = ask(name, top_k=4, top_p=0.9)
    (record,) = records(read_all(events, request, kept=True), request)
    masks, values = [], []
    for event in events:
        new = event["meta_info"]["completion_tokens"] - len(masks)
        masks += event["meta_info"]["output_token_sampling_mask"][-new:]
        values += event["meta_info"]["output_token_sampling_logprobs"][-new:]
    assert record.kept_ids.tolist() == [i for mask in masks for i in mask]
    assert record.kept_offsets.tolist() == [0, 4, 8, 12]
    assert np.array_equal(record.logprobs, np.array(values, np.float32))
    assert (record.logprob_kind, record.top_k) == ("processed", 4)


@pytest.mark.parametrize("name", ["retract_abort_cumulative", "retract_abort_incremental"])
def test_chunks_that_were_sent_as_one(ask, name):
    # The server joins what waits: the last delta and the abort, which repeats its last token
    # (`_coalesce_streaming_chunks`; a cumulative stream takes the newer one).
    events, request = ask(name)
    *early, delta, last = copy.deepcopy(events)
    if name.endswith("incremental"):
        last["output_ids"] = delta["output_ids"] + last["output_ids"]
        for_both = (delta["meta_info"], last["meta_info"])
        last["meta_info"]["output_token_logprobs"] = [
            row for meta in for_both for row in meta["output_token_logprobs"]
        ]
    joined = read_all([*early, last], request)
    assert joined.ids == read_all(events, request).ids
    assert joined.rows == read_all(events, request).rows


def test_a_token_that_repeats_is_not_taken_for_a_cumulative_chunk(make_request):
    # Greedy decoding of a small model says one token again and again: every delta "begins with what we hold".
    request = make_request(100, rid=RID)
    events = [chunk(n, ids=[7], rows=[[-0.5, 7, None]]) for n in (1, 2, 3)]
    assert read_all(events, request).ids == [7, 7, 7]
    events = [chunk(n, ids=[7] * n, rows=[[-0.5, 7, None]] * n) for n in (1, 2, 3)]
    assert read_all(events, request).ids == [7, 7, 7]


def chunk(total, *, ids, rows=None, rid=RID, prompt=9, finish=None, version="run-a/1", spans=None, **meta):
    """One event; `total`: output tokens so far."""
    said = {
        "id": rid,
        "finish_reason": finish,
        "prompt_tokens": prompt,
        "weight_version": version,
        "completion_tokens": total,
        "output_token_logprobs": [[-1.0, i, None] for i in ids] if rows is None else rows,
        **meta,
    }
    return {"output_ids": ids, "meta_info": said | ({"weight_versions": spans} if spans else {})}


LENGTH = {"type": "length", "length": 2}
WHOLE = [{"version": "run-a/1", "start": 0, "end": 2}]
WRONG = {
    "another call's answer": [chunk(1, ids=[5], rid="8" * 32)],
    "another prompt was read (tokenized again)": [chunk(1, ids=[5], prompt=10)],
    "an earlier token changed": [chunk(1, ids=[5]), chunk(2, ids=[6, 7])],
    "an earlier log-probability changed": [
        chunk(1, ids=[5]),
        chunk(2, ids=[5, 7], rows=[[-1.5, 5, None], [-1.0, 7, None]]),
    ],
    "a token is missing": [chunk(1, ids=[5]), chunk(3, ids=[6])],
    "tokens were lost": [chunk(2, ids=[5, 6]), chunk(1, ids=[5])],
    "a log-probability is missing": [chunk(2, ids=[5, 6], rows=[[-1.0, 5, None]])],
    "log-probabilities of other tokens": [chunk(1, ids=[5], rows=[[-1.0, 6, None]])],
    "no log-probabilities at all": [chunk(1, ids=[5], rows=[])],
    "the last token is repeated, but the call was not aborted": [
        chunk(2, ids=[4, 5]),
        chunk(2, ids=[5], rows=[[-1.0, 4, None], [-1.0, 5, None]]),
    ],
    "a chunk after the last one": [chunk(2, ids=[5, 6], finish=LENGTH), chunk(2, ids=[5, 6])],
}


@pytest.mark.parametrize("events", WRONG.values(), ids=WRONG.keys())
def test_chunks_that_cannot_be_true(events, make_request):
    with pytest.raises(EngineError) as failed:
        read_all(events, make_request(100, rid=RID))
    assert (failed.value.cause, failed.value.retryable) == ("contradiction", True)


def spans(*bounds):
    return [{"version": "run-a/1", "start": start, "end": end} for start, end in bounds]


STOP = {"type": "stop", "matched": 6}
UNTRUE = {
    "spans end early": chunk(2, ids=[5, 6], finish=LENGTH, spans=spans((0, 1))),
    "spans go on": chunk(2, ids=[5, 6], finish=LENGTH, spans=spans((0, 3))),
    "spans begin late": chunk(2, ids=[5, 6], finish=LENGTH, spans=spans((1, 2))),
    "spans have a hole": chunk(3, ids=[5, 6, 7], finish=LENGTH, spans=spans((0, 1), (2, 3))),
    "spans overlap": chunk(3, ids=[5, 6, 7], finish=LENGTH, spans=spans((0, 2), (1, 3))),
    "the stop token is not the last": chunk(2, ids=[6, 5], finish=STOP, spans=WHOLE),
    "a stop string that was not asked for": chunk(
        2, ids=[5, 6], finish={"type": "stop", "matched": "NaN happened"}, spans=WHOLE
    ),
    "an unknown finish reason": chunk(2, ids=[5, 6], finish={"type": "tool"}, spans=WHOLE),
    "a log-probability that is none": chunk(
        2, ids=[5, 6], rows=[[None, 5, None], [-1.0, 6, None]], finish=LENGTH, spans=WHOLE
    ),
    "a log-probability above 0": chunk(
        2, ids=[5, 6], rows=[[0.5, 5, None], [-1.0, 6, None]], finish=LENGTH, spans=WHOLE
    ),
}


@pytest.mark.parametrize("event", UNTRUE.values(), ids=UNTRUE.keys())
def test_answers_that_cannot_be_true(event, make_request):
    request = make_request(100, rid=RID)
    answer = read_all([event], request)
    with pytest.raises(EngineError) as failed:
        records(answer, request)
    assert failed.value.cause == "contradiction"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"output_ids": [4294967296]}', b'{"output_ids": [-1]}', b'{"output_ids": ["5"]}'],
)
def test_events_that_are_no_answer(data):
    with pytest.raises(EngineError, match="no answer of /generate"):
        decode_chunk(data)


def test_a_stop_is_the_turns_last_token(make_request):
    request = make_request(100, rid=RID, stop_ids=[6])
    (record,) = records(read_all([chunk(2, ids=[5, 6], finish=STOP, spans=WHOLE)], request), request)
    assert (record.finish_reason, record.stop_id, record.weight_version) == ("stop", 6, 1)


def test_several_runs_of_unknown_weights_are_one_record(make_request):
    request = make_request(100, rid=RID)
    said = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "other/3", "start": 1, "end": 2},
        {"version": "run-a/3", "start": 2, "end": 3},
    ]
    event = chunk(3, ids=[5, 6, 7], finish=LENGTH, spans=said)
    runs = records(read_all([event], request), request)
    assert [(record.weight_version, len(record.output_ids)) for record in runs] == [
        (UNKNOWN_VERSION, 2),
        (3, 1),
    ]


CUT = [chunk(n, ids=list(range(n)), version=f"run-a/{v}") for n, v in ((1, 1), (3, 1), (5, 2), (7, 2))]


@pytest.mark.parametrize(
    ("before", "runs"),
    [
        # What a chunk brings has a known version if the answer before it names the same one.
        ("run-a/1", [(1, 3), (UNKNOWN_VERSION, 2), (2, 2)]),
        ("run-a/0", [(UNKNOWN_VERSION, 1), (1, 2), (UNKNOWN_VERSION, 2), (2, 2)]),
        (None, [(UNKNOWN_VERSION, 1), (1, 2), (UNKNOWN_VERSION, 2), (2, 2)]),
    ],
)
def test_versions_of_a_stream_that_was_cut(make_request, before, runs):
    request = make_request(100, rid=RID)
    partial = records(read_all(CUT, request, before=before), request)
    assert [(record.weight_version, len(record.output_ids)) for record in partial] == runs
    assert {record.finish_reason for record in partial} == {"abort"}


def test_nothing_came(make_request):
    request = make_request(100, rid=RID)
    queued = chunk(0, ids=[], finish={"type": "abort", "message": "Abort in waiting queue"})
    del queued["meta_info"]["prompt_tokens"]
    (record,) = records(read_all([queued], request), request)
    assert (len(record.output_ids), len(record.logprobs), record.finish_reason) == (0, 0, "abort")
    assert record.weight_version == 1


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10**6])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_events_however_they_are_cut(recording, size, ends):
    data = recording.bytes("abort_cumulative").replace(b"\n", ends)
    reader = EventReader()
    found = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
    assert [json.loads(event) for event in found[:-1]] == recording("abort_cumulative")
    assert found[-1] == b"[DONE]"


def test_comments_and_other_fields_are_left_out():
    data = b": keep-alive\n\nevent: message\nid: 7\ndata:{}\n\n\n\ndata: [DO"
    reader = EventReader()
    assert list(reader.feed(data)) == [b"{}"]
    assert list(reader.feed(b"NE]\n\n")) == [b"[DONE]"]


def test_an_event_longer_than_any_line_limit():
    reader = EventReader()
    line = b"data: " + b"x" * 3_000_000
    found = [event for at in range(0, len(line), 65536) for event in reader.feed(line[at : at + 65536])]
    assert found == []
    assert [len(event) for event in reader.feed(b"\n\n")] == [3_000_000]
