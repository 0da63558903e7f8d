"""The launcher's memory of requests: what was carried out once is never carried out again."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_k8s.launcher.replies import AnswerGoneError, Asked, Replies, Reply, TooManyRequestsError


class Site:
    """Counts what is carried out."""

    def __init__(self, **bounds: int) -> None:
        self.now_s = 0.0
        self.replies = Replies(now_s=lambda: self.now_s, **bounds)
        self.runs: dict[str, int] = {}

    def ask(self, name: str, size: int = 1, keep_s: float = 10.0) -> Reply:
        def produce() -> Reply:
            self.runs[name] = self.runs.get(name, 0) + 1
            return Reply(b"x" * size)

        answer = self.replies.once(Asked("/execute", 1, name), keep_s, produce, _allowed)
        assert isinstance(answer, Reply)
        return answer


def _allowed() -> None:
    return


def test_a_repetition_waits_for_the_first_and_gets_its_answer() -> None:
    replies, begun, go_on = Replies(), threading.Event(), threading.Event()
    runs: list[str] = []
    answers: list[object] = []

    def produce() -> Reply:
        runs.append("run")
        begun.set()
        assert go_on.wait(10)
        return Reply(b"answer")

    def ask() -> None:
        answers.append(replies.once(Asked("/x", None, "id"), 10.0, produce, _allowed))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert runs == ["run"]
    assert answers == [Reply(b"answer")] * 3


def test_many_others_in_between_do_not_make_it_run_again() -> None:
    """It ran again after 64 others (the answers alone were counted)."""
    site = Site()
    for number in range(5000):
        site.ask(str(number))
    assert site.ask("0") == Reply(b"x")
    assert site.runs["0"] == 1


def test_an_answer_that_is_too_large_or_made_room_is_gone_and_says_so() -> None:
    """An answer of more than 1 MiB was not kept, and its command ran again."""
    site = Site(most_bytes=4000)
    site.ask("large", size=5000)
    site.ask("first", size=2000)
    site.ask("second", size=2000)
    for name in ("large", "first"):
        with pytest.raises(AnswerGoneError, match=f"request {name} was carried out"):
            site.ask(name)
    assert site.ask("second").body == b"x" * 2000
    assert set(site.runs.values()) == {1}


def test_when_all_may_come_again_a_new_one_is_refused_and_none_is_forgotten() -> None:
    site = Site(most_requests=3)
    for name in "abc":
        site.ask(name, keep_s=10.0 if name == "b" else 100.0)
    with pytest.raises(TooManyRequestsError):
        site.ask("d")
    site.now_s = 10.0
    site.ask("d")
    site.ask("a")
    assert site.runs == dict.fromkeys("abcd", 1)


def test_what_did_not_begin_may_come_anew() -> None:
    replies = Replies()

    def broken() -> Reply:
        raise ConnectionResetError("the body ended early")

    with pytest.raises(ConnectionResetError):
        replies.once(Asked("/x", 1, "id"), 10.0, broken, _allowed)
    assert replies.once(Asked("/x", 1, "id"), 10.0, lambda: Reply(b"now"), _allowed) == Reply(b"now")


def test_an_id_belongs_to_one_path_of_one_owner_who_may_still_see_the_answer() -> None:
    replies = Replies()
    asked = (Asked("/x", 1, "id"), Asked("/y", 1, "id"), Asked("/x", 2, "id"), Asked("/x", None, "id"))
    for number, one in enumerate(asked):
        body = str(number).encode()
        assert replies.once(one, 10.0, lambda body=body: Reply(body), _allowed) == Reply(body)

    def fenced() -> None:
        raise PermissionError("fenced")

    with pytest.raises(PermissionError):
        replies.once(asked[0], 10.0, _never, fenced)


def _never() -> Reply:
    raise AssertionError


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 900), st.floats(0, 4))),
    st.integers(500, 3000),
    st.integers(2, 8),
)
def test_at_most_once_within_its_time_and_within_bounds(
    asks: list[tuple[str, int, float]], most_bytes: int, most_requests: int
) -> None:
    site = Site(most_bytes=most_bytes, most_requests=most_requests)
    kept_until_s: dict[str, float] = {}
    for name, size, passes_s in asks:
        before = site.runs.get(name, 0)
        if _refused(lambda name=name, size=size: site.ask(name, size, keep_s=5.0)):
            continue
        ran = site.runs[name] - before
        assert not (ran and site.now_s < kept_until_s.get(name, 0.0))
        if ran:
            kept_until_s[name] = site.now_s + 5.0
        assert len(site.replies._until_s) <= most_requests
        assert sum(len(one.body) for one in site.replies._answers.values()) <= most_bytes
        site.now_s += passes_s


def _refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except TooManyRequestsError:
        return True
    except AnswerGoneError:
        return False
    return False
