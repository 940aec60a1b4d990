"""Calibration files are refused with the field, the reason and the line."""

from __future__ import annotations

import json

import pytest
from calibrations import uniform
from makara.simulator import Calibration, InvalidCalibration

TEXT = json.dumps(uniform(2, microbatch_size=4).to_json(), indent=1)


def broken(old: str, new: str) -> tuple[str, int]:
    """The text with one change, and the line that it is on."""
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new), TEXT[: TEXT.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"microbatch_size": 4', '"microbatch_size": -4', "microbatch_size: -4 is not a whole number >= 1"),
        ('"microbatch_size": 4', '"microbatch": 4', "microbatch: unknown field; known are"),
        ('"device_kind": "cpu"', '"device_kind": 3', "device_kind: expected text, got int"),
        ('"cut_bytes": [\n  4\n ]', '"cut_bytes": [\n  4, 5\n ]', "cut_bytes: expected 1 entries for K=2"),
        ('"torch": "2.13"', '"torch": 2', "versions.torch: expected text"),
        ('"versions": {', '"versions": {,', "not JSON"),
    ],
)
def test_a_bad_calibration_file_is_refused_with_the_line(old: str, new: str, message: str) -> None:
    text, line = broken(old, new)
    with pytest.raises(InvalidCalibration) as refused:
        Calibration.from_json(text)
    assert message in refused.value.message
    assert refused.value.line == line


def test_an_entry_of_a_list_has_a_line_of_its_own() -> None:
    text = TEXT.replace('"optimizer_s": [\n  0.5,\n  0.5\n', '"optimizer_s": [\n  0.5,\n  -0.5\n')
    with pytest.raises(InvalidCalibration) as refused:
        Calibration.from_json(text)
    line = text[: text.index("-0.5")].count("\n") + 1
    assert str(refused.value) == f"line {line}: optimizer_s[1]: -0.5 is not a number of seconds >= 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "line 1: calibration: expected an object, got list"),
        ("{", "line 1: not JSON"),
        ('{"format": 1,\n"format": 1}', "line 2: format: given twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_calibration_at_all_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidCalibration, match=message):
        Calibration.from_json(text)
