"""What a harness passes as messages: held as exact JSON values, compared with types, or refused."""

import enum
import json
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from token_tracking import ChatTemplate, Conversation, TemplateError, UnsupportedContentError
from token_tracking.messages import own
from token_tracking.same_messages import Numbered, common_prefix
from token_tracking.testing import completion

Compile = Callable[..., ChatTemplate]


class Role(str, enum.Enum):  # noqa: UP042 - str() of it is not its text
    USER = "user"


class Level(enum.IntEnum):
    HIGH = 3


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def exact(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and exact(item) for key, item in value.items())
    return (
        all(map(exact, value)) if type(value) is list else type(value) in (str, int, float, bool, type(None))
    )


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (Loud("a"), "a"),
        (Role.USER, "user"),
        (Markup("a < b"), "a < b"),
        (np.str_("é"), "é"),
        (Level.HIGH, 3),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (OrderedDict(b=(1, Loud("x"))), {"b": [1, "x"]}),
        (UserDict({Loud("key"): [True]}), {"key": [True]}),
        (2**1000, 2**1000),
    ],
)
def test_what_is_held_is_of_exact_types(given: Any, held: Any):
    (message,) = own([{"role": Role.USER, "content": "x", Loud("field"): given}])
    assert message == {"role": "user", "content": "x", "field": held}
    assert exact(message)
    assert json.loads(json.dumps(message)) == message


@pytest.mark.parametrize("text", [Role.USER, Markup("a < b"), Loud("hello")])
def test_a_str_subclass_prints_as_its_text_and_the_same_after_a_snapshot(compiled: Compile, text: str):
    """A template that joins with `~` or escapes prints an enum member and a `Markup` otherwise."""
    template = compiled("qwen3")
    conversation = Conversation(template)
    conversation.advance([{"role": Role.USER, "content": text}])
    plain = Conversation(template)
    plain.advance([user(str.__str__(text))])
    before = conversation.prompt_ids()
    assert np.array_equal(before, plain.prompt_ids())
    restored = Conversation.from_bytes(conversation.to_bytes(), template)
    assert np.array_equal(before, restored.prompt_ids())


@pytest.mark.parametrize(
    ("held", "given", "alike"),
    [
        (1, True, False),
        (1, 1.0, False),
        (0, False, False),
        (0.0, -0.0, False),
        ([1], [True], False),
        ({"a": {"b": 0}}, {"a": {"b": False}}, False),
        (1, np.int64(1), True),
        (1.5, np.float32(1.5), True),
        (True, np.bool_(True), True),
        (float("nan"), float("nan"), True),
        ([1, "x"], (1, Loud("x")), True),
        (2**70, 2**70, True),
    ],
)
def test_numbers_are_compared_with_their_types(held: Any, given: Any, alike: bool):
    numbered = Numbered()
    for history in ([user("x")], [user("x"), {**user("y"), "n": 0}]):
        mine = own([*history, assistant(call({"n": held}))])
        theirs = [*history, assistant(call({"n": given}))]
        assert common_prefix(mine, theirs, numbered) == len(history) + alike
        as_text = [*history, assistant(call(json.dumps({"n": own([{"role": "x", "n": given}])[0]["n"]})))]
        assert common_prefix(mine, as_text, numbered) == len(history) + alike


def test_what_was_found_of_one_history_is_not_used_for_another():
    numbered = Numbered()
    first, second = own([user("x"), {**user("y"), "n": 1}]), own([{**user("x"), "n": 1}, user("y")])
    for held in (first, second, first[:1], second, first):
        assert common_prefix(held, [dict(message) for message in held], numbered) == len(held)
        changed = [{**message, "n": True} if "n" in message else message for message in held]
        first_number = next((at for at, message in enumerate(held) if "n" in message), len(held))
        assert common_prefix(held, changed, numbered) == first_number


def test_fields_in_another_order_or_left_empty_say_the_same():
    held = own([user("x"), assistant(call('{"n": 1}'))])
    theirs = [dict(reversed(user("x").items())), {**assistant(call({"n": 1})), "refusal": None, "audio": []}]
    assert common_prefix(held, theirs, Numbered()) == 2
    assert common_prefix(held, tuple(held), Numbered()) == 2


def test_an_edited_number_is_not_appended_to_what_the_model_sampled(compiled: Compile):
    conversation = Conversation(compiled("qwen3"))
    conversation.advance([user("x")])
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": 1}}\n</tool_call>'
    conversation.record(completion(conversation, text))
    result = {"role": "tool", "content": "r", "tool_call_id": "call_0"}
    assert conversation.plan([user("x"), assistant(call({"command": 1})), result]).kind == "append"
    assert conversation.plan([user("x"), assistant(call({"command": True})), result]).kind != "append"


class Uncomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    __hash__ = object.__hash__


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

WRONG: list[tuple[Any, str]] = [
    ("x", "must be a mapping, got a str"),
    (None, "must be a mapping, got a NoneType"),
    ({"content": "x"}, "has no role"),
    ({**assistant(), "tool_calls": "abc"}, "tool_calls must be a list"),
    ({**assistant(), "tool_calls": [None]}, "tool_calls must be a list"),
    ({**assistant(), "tool_calls": 5}, "tool_calls must be a list"),
    ({**assistant(), "tool_calls": np.array([1, 2])}, "holds a ndarray"),
    (user(np.array(["a", "b"])), r"\(user\): holds a ndarray"),
    (user(Uncomparable()), "holds a Uncomparable"),
    (user(b"x"), "holds a bytes"),
    ({**user("x"), "n": ENDLESS}, "nested too deeply"),
    ({**user("x"), "n": 10**5000}, "number of 16610 bits"),
    ({**user("x"), 5: "n"}, "key 5 is not a string"),
]


@pytest.mark.original("A-query-history")
@pytest.mark.parametrize(("wrong", "why"), WRONG)
def test_a_wrong_message_is_refused_by_name_wherever_it_stands(compiled: Compile, wrong: Any, why: str):
    """Before or after what is held, in a history that was held before, or as the first one."""
    held = [user("x"), assistant(call("{}")), {"role": "tool", "content": "r", "tool_call_id": "call_0"}]
    for at, history in ((0, []), (0, held), (1, held), (3, held)):
        conversation = Conversation(compiled("qwen3"))
        if history:
            conversation.advance(history)
        before = conversation.to_bytes()
        given = [*held[:at], wrong, *held[at + 1 :]]
        for ask in (conversation.plan, conversation.advance):
            with pytest.raises(TemplateError, match=f"message {at}.*{why}"):
                ask(given)
        assert conversation.to_bytes() == before


def test_an_image_in_place_of_a_held_message_is_refused(compiled: Compile):
    conversation = Conversation(compiled("qwen3"))
    conversation.advance([user("x")])
    with pytest.raises(UnsupportedContentError, match="message 0"):
        conversation.plan([user([{"type": "image"}])])
