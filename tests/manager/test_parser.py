"""Options and commands of `makara`, without running them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from makara.manager.cli.parser import parser


def commands(
    of: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command, at any depth, with its parser."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield (*words, name), inner
                yield from commands(inner, (*words, name))


def test_every_option_that_takes_a_path_may_begin_in_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-mine")
    seen = 0
    for words, command in commands(parser()):
        for action in command._actions:
            assert action.type is not Path, f"{words}: {action.dest} leaves ~ as it is"
            if getattr(action.type, "__name__", "") == "path":
                seen += 1
                assert action.type("~/x") == Path("/home/of-mine/x")
    assert seen > 20


def test_the_home_of_an_unknown_user_is_a_mistake_in_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["ps", "--home=~no-such-user/x"])
    assert "the home folder ~no-such-user is not known on this machine" in capsys.readouterr().err
