"""Aborts that do not come through, and chunks of an aborted call."""

import pytest
from agent_flow.engines.sglang_stream import Answer, Finish, MetaInfo

pytestmark = pytest.mark.anyio
RID = "a" * 32


def meta(*ids, finish=None, count=None):
    return MetaInfo(
        id=RID,
        finish_reason=finish,
        weight_version="run/1",
        completion_tokens=len(ids) if count is None else count,
        prompt_tokens=3,
        output_token_logprobs=[(-1.0, token, None) for token in ids],
    )


async def test_a_cumulative_chunk_that_repeats_a_token_is_read_as_what_it_is():
    answer = Answer(RID, 3, kept_sets=False, version_before="run/1")
    answer.add(meta(7), [7])
    answer.add(meta(7, 8, 8, finish=Finish("abort")), [7, 8, 8])
    assert answer.ids == [7, 8, 8]


async def test_an_incremental_chunk_that_repeats_a_token_still_is():
    answer = Answer(RID, 3, kept_sets=False, version_before="run/1")
    answer.add(meta(7), [7])
    answer.add(meta(8, finish=Finish("abort"), count=2), [8, 8])
    assert answer.ids == [7, 8]
