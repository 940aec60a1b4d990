"""Options and commands of `makara`, without running them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from makara.manager.cli.parsing.parser import parser
from makara.manager.cli.parsing.suggestions import _COMMANDS, _OPTIONS, Parser


def commands(
    of: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command, at any depth, with its parser."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield (*words, name), inner.filled() if isinstance(inner, Parser) else inner
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


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cancel JOB", "unknown command 'cancel'; did you mean `makara stop JOB`?"),
        ("aply -f x", "did you mean `makara apply`?"),
        ("launch x", "did you mean `makara apply -f job.yaml`?"),
        ("job.yaml", "did you mean `makara apply -f job.yaml`?"),
        ("list", "did you mean `makara ps`?"),
        ("log JOB", "did you mean `makara logs`?"),
        ("frobnicate", "unknown command 'frobnicate'\n"),
        ("token ad x", "did you mean `makara add`?"),
        ("logs JOB --follow", "`makara follow JOB` shows progress as it is made"),
        ("logs JOB --folow", "unrecognized arguments: --folow"),
        ("ps --jsn", "did you mean --json?"),
        ("token list --jsom", "did you mean --json?"),
        ("apply job.yaml --detached", "unrecognized arguments: --detached; --detach"),
        ("apply job.yaml --max-nodes 4", "in the job file: did you mean resources.max_nodes?"),
        ("apply job.yaml --nproc_per_node=4", "in the job file: that belongs in resources.workers_per_node"),
        ("apply", "the job file is required; expected makara apply -f job.yaml"),
        ("simulate --trace x", "the job file is required; expected makara simulate -f job.yaml"),
        ("apply a.yaml -f b.yaml", "the job file is given twice (b.yaml, a.yaml)"),
        ("apply a.yaml b.yaml", "unrecognized arguments: b.yaml"),
        ("up awz", "invalid choice: 'awz' (choose from"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_was_meant(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *given.split())


@pytest.mark.parametrize("command", ["apply", "plan", "simulate --market calm"])
def test_the_job_file_may_be_given_without_its_option(command: str) -> None:
    for given in ("job.yaml", "-f job.yaml", "--file job.yaml"):
        assert parser().parse_args([*command.split(), *given.split()]).file == Path("job.yaml")


def test_every_command_that_is_suggested_exists() -> None:
    known = parser().commands
    assert {command.split()[0] for command in _COMMANDS.values()} <= {*known}
    assert {*_OPTIONS} <= {*known}
    assert not {word for words in _COMMANDS for word in words.split()} & {*known}
