"""The stacks of a stalled trainer, as a person reads them."""

from __future__ import annotations

from pathlib import Path

from makara.manager.cli.show import describe
from makara.worker.stacks import lead

CODE = Path("/vm/bundle")
LANE = """Thread 0x00007fb0c6c856c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/makara/worker/execution/p2p_channels.py", line 201 in _run
"""
MAIN = """Current thread 0x00007fb0c77efb80 (most recent call first):
  File "/vm/bundle/.venv/lib/python3.11/site-packages/reader/io.py", line 7 in read
  File "/vm/bundle/data/train.py", line 85 in __getitem__
  File "/makara/model/data.py", line 60 in load
"""


def test_stacks_begin_with_the_innermost_line_of_the_jobs_code_and_the_thread_that_computes() -> None:
    """Found: a list of events showed the first two lines of a thread of Makara's, and no more."""
    text = lead(f"a line that it printed\n{LANE}\n{MAIN}", CODE)
    assert text == f"in __getitem__, data/train.py line 85\n\n{MAIN}\n{LANE}"
    told = describe({"fact": "stacks_taken", "at": 1.0, "number": 1, "worker": "v1.0", "text": text})
    assert "\n" not in told
    assert "in __getitem__, data/train.py line 85" in told


def test_another_thread_of_the_jobs_code_leads_where_the_one_that_computes_is_in_none() -> None:
    theirs = LANE.replace("/makara/worker/execution/p2p_channels.py", "/vm/bundle/train.py")
    computing = MAIN.replace("/vm/bundle", "/elsewhere")
    assert lead(f"{theirs}\n{computing}", CODE).startswith("in _run, train.py line 201\n\nCurrent thread")


def test_stacks_without_any_code_of_the_jobs_begin_with_where_it_computes() -> None:
    assert lead(f"{LANE}\n{MAIN}", Path("/other")).startswith("in read, /vm/bundle/.venv/lib")


def test_what_is_no_stack_is_left_as_it_is() -> None:
    assert lead("a line that it printed\n", CODE) == "a line that it printed\n"
    assert lead("", CODE) == ""
