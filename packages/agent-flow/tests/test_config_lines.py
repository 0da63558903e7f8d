"""Where keys stand: the scan of a TOML text finds exactly the keys that tomllib reads, in their lines."""

import tomllib

import pytest
import tomli_w
from agent_flow.toml_lines import toml_lines
from agent_flow.yaml_lines import yaml_line
from hypothesis import given
from hypothesis import strategies as st

TEXT = (
    '''\
# [not.a.table]
title = "a # no comment" # key = 1
"quoted \\"key\\"" = 1
'literal.key' = """
[fake]
x = 1 \\"""
"""""
dates = [1979-05-27 07:32:00, 1979-05-27T07:32:00Z]
a.b . c = { d = [1, { e = 'x]', "f" = """}""" }], g.h = 2 }
lines = [
  "one", # ] inside a comment
  """two
  three""",
  [ 4, 5 ],
  { six = \'\'\'
7\'\'\', eight = 8 },
]

[x.y."z.z"]
k = 1
[[fruit]]
name = "apple"
[fruit.physical]
color = "red"
[[fruit.variety]]
name = "a"
[[fruit.variety]]
name = "b"
[ [fruit] ]
'''.replace("[ [fruit] ]", "[[ fruit ]]")
    + '[[fruit.variety]]\nname = "c"\n[x]\nlast = true'
)


def ways(value, way=()):
    if way:
        yield way
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ways(inner, (*way, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from ways(inner, (*way, number))


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("\n", "\r\n")], ids=["lf", "crlf"])
def test_every_key_is_found_in_its_line(text):
    lines = toml_lines(text)
    assert set(lines) == set(ways(tomllib.loads(text)))
    rows = text.splitlines()

    def row(*way):
        return rows[lines[way] - 1]

    assert row("title").startswith("title")
    assert row('quoted "key"').startswith('"quoted')
    assert row("literal.key").startswith("'literal")
    assert row("dates").startswith("dates")
    assert row("a", "b", "c", "d", 1, "f") == row("a", "b", "c", "g", "h") == row("a")
    assert row("a").startswith("a.b . c")
    assert row("lines", 0) == '  "one", # ] inside a comment'
    assert row("lines", 2, 1) == "  [ 4, 5 ],"
    assert row("lines", 3, "eight") == "7''', eight = 8 },"
    assert row("x", "y", "z.z") == '[x.y."z.z"]'
    assert row("x") == "[x]", "where it is opened, not where it is only passed through"
    assert row("x", "last") == "last = true"
    assert row("fruit") == "[[fruit]]"
    assert row("fruit", 0, "physical", "color") == 'color = "red"'
    assert row("fruit", 0, "variety", 1, "name") == 'name = "b"'
    assert row("fruit", 1) == "[[ fruit ]]"
    assert row("fruit", 1, "variety", 0, "name") == 'name = "c"'


SCALARS = st.text() | st.integers(-(2**40), 2**40) | st.booleans() | st.floats(allow_nan=False) | st.dates()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=5), st.booleans())
def test_any_toml(values, multiline):
    text = tomli_w.dumps(values, multiline_strings=multiline)
    assert set(toml_lines(text)) == set(ways(tomllib.loads(text)))


@given(st.text(alphabet="[]{}=,.\"'#ab1\n \\", max_size=40))
def test_a_text_that_is_not_toml_ends_too(text):
    toml_lines(text)


def test_keys_of_yaml():
    text = (
        "base: &base\n  deep:\n    - a: 1\n      b: 2\n    - {c: 3}\nmore:\n  <<: *base\n  own: 1\n"
        "list:\n  <<: [*base, {d: 1}]\n"
    )
    assert yaml_line(text, ("base", "deep", 0, "b")) == 4
    assert yaml_line(text, ("base", "deep", 1, "c")) == 5
    assert yaml_line(text, ("more", "own")) == 8
    assert yaml_line(text, ("more", "deep", 0, "a")) == 3
    assert yaml_line(text, ("list", "d")) == 10
    assert yaml_line(text, ("base", "deep", 7)) is None
    assert yaml_line(text, ("nothing",)) is None
    assert yaml_line("a: [", ("a",)) is None
