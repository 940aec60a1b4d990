"""Calibration files are refused with the field, the reason and the line."""

from __future__ import annotations

import json

import pytest
from calibrations import uniform
from makara.simulator import Calibration, InvalidCalibration
from makara.simulator.source_lines import read_json

TEXT = json.dumps(uniform(2, microbatch_size=4).to_json(), indent=1)


def read_calibration(text: str) -> Calibration:
    return read_json(text, Calibration.from_json, InvalidCalibration)


def broken(old: str, new: str) -> tuple[str, int]:
    """The text with one change, and the line that it is on."""
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new), TEXT[: TEXT.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"microbatch_size": 4',
            '"microbatch_size": -4',
            "microbatch_size: expected greater than or equal to 1, got -4",
        ),
        (
            '"microbatch_size": 4',
            '"microbatch": 4',
            "microbatch: unknown key; did you mean microbatch_size? (accepted here: ",
        ),
        ('"device_kind": "cpu"', '"device_kind": 3', "device_kind: expected a valid string, got 3"),
        ('"cut_bytes": [\n  4\n ]', '"cut_bytes": [\n  4, 5\n ]', "cut_bytes: expected 1 entries for K=2"),
        ('"torch": "2.13"', '"torch": 2', "versions.torch: expected a valid string, got 2"),
        ('"versions": {', '"versions": {,', "not JSON"),
        ('"versions": {', '"version": {', "version: unknown key; did you mean versions?"),
    ],
)
def test_a_bad_calibration_file_is_refused_with_the_line(old: str, new: str, message: str) -> None:
    text, line = broken(old, new)
    with pytest.raises(InvalidCalibration) as refused:
        read_calibration(text)
    assert message in refused.value.message
    assert refused.value.line == line


def test_an_entry_of_a_list_has_a_line_of_its_own() -> None:
    text = TEXT.replace('"optimizer_s": [\n  0.5,\n  0.5\n', '"optimizer_s": [\n  0.5,\n  -0.5\n')
    with pytest.raises(InvalidCalibration) as refused:
        read_calibration(text)
    line = text[: text.index("-0.5")].count("\n") + 1
    assert str(refused.value) == f"line {line}: optimizer_s[1]: expected greater than or equal to 0, got -0.5"


@pytest.mark.parametrize("field", ["format", "versions"])
def test_a_file_states_what_has_a_default_in_python(field: str) -> None:
    value = {name: item for name, item in json.loads(TEXT).items() if name != field}
    with pytest.raises(InvalidCalibration, match=f"line 1: {field}: is required"):
        read_calibration(json.dumps(value, indent=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "line 1: calibration: expected a mapping of keys to values, got \\[\\]"),
        ("{", "line 1: not JSON"),
        ('{"format": 1,\n"format": 1}', "line 2: format: given twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_calibration_at_all_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidCalibration, match=message):
        read_calibration(text)
