"""The manager's log does not grow with the number of times that one thing happens."""

from __future__ import annotations

import io
import logging

import pytest
from makara.manager.log_limit import LogLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def logger(written: io.StringIO, clock: Clock, most: int = 3) -> logging.Logger:
    handler = logging.StreamHandler(written)
    handler.addFilter(LogLimit(most, period_s=60.0, clock=clock))
    made = logging.Logger("test")
    made.addHandler(handler)
    return made


def test_a_line_that_is_repeated_is_logged_a_few_times_then_counted() -> None:
    written, clock = io.StringIO(), Clock()
    log = logger(written, clock)
    for number in range(10):
        if number == 9:
            clock.now += 61.0
        log.warning("refused: %d", number)
    assert written.getvalue().splitlines() == [
        "refused: 0",
        "refused: 1",
        "refused: 2",
        "refused: 9 (6 more like this were not logged)",
    ]


def test_a_line_that_is_repeated_hides_no_other() -> None:
    written, clock = io.StringIO(), Clock()
    log = logger(written, clock)
    for number in range(100):
        log.warning("refused: %d", number)
    log.warning("the disk is full")
    assert written.getvalue().splitlines()[-1] == "the disk is full"


def test_a_long_message_is_cut() -> None:
    written, clock = io.StringIO(), Clock()
    logger(written, clock).warning("refused: %s", "x" * 1_000_000)
    assert len(written.getvalue()) < 5000


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("message", "args"),
    [("%d files", ("many",)), ("%s and %s", ("one",)), ("%(a)s", ("b",)), ("%s", (Unprintable(),))],
)
def test_a_message_that_does_not_fit_its_arguments_does_not_stop_the_code_that_logs(
    capsys: pytest.CaptureFixture[str], message: str, args: tuple[object, ...]
) -> None:
    written, clock = io.StringIO(), Clock()
    log = logger(written, clock)
    for _ in range(10):
        log.warning(message, *args)
    assert capsys.readouterr().err.count("--- Logging error ---") == 3, (
        "as Python does it, but not without end"
    )
    log.warning("next")
    assert written.getvalue().splitlines() == ["next"]


def test_a_long_message_of_an_error_is_cut() -> None:
    written, clock = io.StringIO(), Clock()
    log = logger(written, clock, most=10)
    for error in (ValueError("x" * 1_000_000), ExceptionGroup("y" * 1_000_000, [OSError("z" * 1_000_000)])):
        try:
            raise RuntimeError("outer") from error
        except RuntimeError:
            log.exception("it failed")
    text = written.getvalue()
    assert len(text) < 10_000
    assert text.count("it failed") == 2
    assert text.count("Traceback") >= 2
    assert text.rstrip().endswith("RuntimeError: outer")
