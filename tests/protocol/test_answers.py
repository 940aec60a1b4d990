"""The answer of a process that runs the user's code is found among all that this code prints."""

from __future__ import annotations

import pytest
from makara.protocol.answers import answer_in, write_answer


@pytest.mark.parametrize("before", ["", "step 1\n", "no end of the line", '{"loss": 1}\n'])
@pytest.mark.parametrize("after", ["", "goodbye", "goodbye\n", '{"loss": 1}\n', "[" * 100_000])
def test_the_answer_is_found_whatever_is_printed_around_it(
    before: str, after: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print(before, end="")
    write_answer({"ok": True})
    print(after, end="")
    assert answer_in(capsys.readouterr().out) == {"ok": True}


@pytest.mark.parametrize("printed", ["", "goodbye\n", '{"ok": true}\n', '"answer of makara"\n'])
def test_what_only_the_users_code_prints_is_no_answer(printed: str) -> None:
    assert answer_in(printed) is None
