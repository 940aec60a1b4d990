"""The line of a field: in YAML, in JSON, in what is not whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makara.simulator.source_lines import Lines, decode, located, parse_json
from makara.simulator.validation import FileFault

YAML = """\
# a job
name: gpt
training:
  steps: 20

  envs: {a.b: 1,
         a: 2}
secrets:
- FIRST
- {deep: [1,
    2]}
"""


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("name", 2),
        ("training", 3),
        ("training.steps", 4),
        ("training.colour", 3),
        ("training.envs.a.b", 6),
        ("training.envs.a", 7),
        ("secrets[0]", 9),
        ("secrets.0", 9),
        ("secrets[1].deep[1]", 11),
        ("secrets[7]", 8),
        ("nowhere", 2),
        ("", 2),
    ],
)
def test_a_field_of_a_yaml_text_has_its_line_or_that_of_what_is_around_it(field: str, line: int) -> None:
    assert Lines(YAML).of(field) == line


def values() -> st.SearchStrategy[Any]:
    keys = st.text(st.characters(codec="ascii", exclude_characters=".[]"), min_size=1, max_size=5)
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
    )


@given(st.dictionaries(st.sampled_from(["alpha", "beta", "gamma"]), values(), min_size=1), st.booleans())
def test_every_field_of_a_json_text_has_its_line(value: dict[str, Any], tabs: bool) -> None:
    text = json.dumps(value, indent="\t" if tabs else 2)
    lines = Lines(text)
    for key in value:
        line = lines.of(key)
        assert line is not None
        assert text.splitlines()[line - 1].strip().startswith(json.dumps(key))


def test_what_cannot_be_read_has_no_lines() -> None:
    assert Lines("").of("a") is None
    assert Lines("{a: ").of("a") is None
    assert Lines("[" * 100_000).of("a") is None
    assert Lines("a: &a {b: *a}").of("a.b.b.b") == 1
    assert list(Lines("a: &a {b: *a}").repeated()) == []


def test_a_key_that_is_given_twice_is_told_with_both_lines() -> None:
    text = "a: {b: 1,\n  b: 2}\nc:\n- {d: 1}\na: 3\n"
    assert list(Lines(text).repeated()) == [("a.b", 2, 1), ("a", 5, 1)]
    with pytest.raises(FileFault, match=r"^line 3: links\[0\]\.x: given twice, first in line 2$"):
        parse_json('{"links": [\n{"x": 1,\n"x": 2}]}', FileFault)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n "b" 2}', r"^line 2: not JSON: Expecting ':' delimiter \(column 6\)$"),
        ("", r"^line 1: not JSON: Expecting value"),
        ("[" * 100_000, "^not JSON: nested too deeply$"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(FileFault, match=said):
        parse_json(text, FileFault)


def test_what_is_not_utf_8_is_refused_with_its_line() -> None:
    assert decode("\ufeffn\u00e4me".encode(), FileFault) == "n\u00e4me"
    with pytest.raises(FileFault, match=r"^line 2: not UTF-8: byte 0xe4; save the file as UTF-8$"):
        decode("a\nn\u00e4me".encode("latin-1"), FileFault)


def test_a_fault_takes_the_line_of_its_field() -> None:
    fault = FileFault("b[1]: -1 is not a time >= 0")
    assert str(fault) == "b[1]: -1 is not a time >= 0"
    found = located(fault, '{"a": 1,\n"b": [1,\n-1]}')
    assert str(found) == "line 3: b[1]: -1 is not a time >= 0"
    assert found.in_file("c.json") == "c.json:3: b[1]: -1 is not a time >= 0"
    assert located(found, "") is found
