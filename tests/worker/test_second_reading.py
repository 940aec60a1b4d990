"""The data set is the same in every process: what its factory draws is seeded, and what cannot be is found by
opening it in a second process."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from coupled_models import sound
from makara.manager.cli import main as cli
from makara.model.data import open_dataset
from makara.model.training import load_entrypoint
from makara.worker.check.findings import Report
from makara.worker.check.second_reading import SecondReading, patience_s, second_reading

SUPPORT = Path(__file__).parents[1] / "support"
TRAIN = """
import atexit, random, sys
import numpy as np
import torch
sys.path.append(SUPPORT)
from coupled_models import Data, sound

if "pytest" not in sys.modules:
    atexit.register(print, "goodbye")


class Ordered(Data):
    def __init__(self, order, noise=False):
        self.order, self.noise = order, noise

    def __getitem__(self, index):
        sample = super().__getitem__(self.order[index])
        if self.noise:
            sample["tokens"] = (sample["tokens"] + random.randrange(9) + torch.randint(9, (8,))) % 16
        return sample


def shuffled():
    order = [int(i) for i in np.random.permutation(20)]
    random.shuffle(order)
    return Ordered([order[i] for i in torch.randperm(20).tolist()], noise=True)


def unsorted():
    return Ordered([int(name) for name in {str(number) for number in range(20)}])


def good():
    return sound(dataset=shuffled)


def bad():
    return sound(dataset=unsorted)
""".replace("SUPPORT", repr(str(SUPPORT)))


class Drawn:
    def __init__(self) -> None:
        self.drawn = np.random.permutation(9), torch.randperm(9), random.random()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.drawn[1][index] + int(self.drawn[0][index]) + self.drawn[2]}


def test_what_the_factory_draws_follows_from_the_seed_alone() -> None:
    training = sound(dataset=Drawn)
    first, other = ([dict(open_dataset(training, seed)[i])["x"] for i in range(9)] for seed in (3, 4))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert [dict(open_dataset(training, 3)[i])["x"] for i in range(9)] == first != other


def test_opening_the_data_leaves_the_generators_as_they_were() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    open_dataset(sound(dataset=Drawn), 3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_seeded_order_and_augmentations_are_the_same_in_a_second_process(tmp_path: Path) -> None:
    (tmp_path / "shuffled_train.py").write_text(TRAIN)
    with second_reading(tmp_path, "shuffled_train:good", 3) as reading:
        training, report = load_entrypoint(tmp_path, "shuffled_train:good"), Report()
        reading.compare(open_dataset(training, 3), 3, 0.0, report)
    assert report.findings == []
    assert report.notes == []


def compared_with(script: str) -> Report:
    """With what a process says that runs this script."""
    report = Report()
    with subprocess.Popen(["sh", "-c", f"read line; {script}"], stdin=-1, stdout=-1, text=True) as process:
        SecondReading(process).compare(Drawn(), 3, 0.0, report)
    return report


def test_a_second_process_that_a_signal_ends_is_a_note_and_no_fault_of_the_data() -> None:
    """Found: one that the kernel ended for its memory was 'could not open the data'."""
    report = compared_with("kill -9 $$")
    assert report.findings == []
    assert "was ended by SIGKILL" in report.notes[0]


def test_a_second_process_that_ends_by_itself_could_not_open_the_data() -> None:
    (finding,) = compared_with("echo '{}'; exit 3").findings
    assert "could not open the data that this one opened: its process ended with status 3" in str(finding)


def test_a_second_process_may_take_longer_where_the_first_one_did() -> None:
    assert patience_s(1.0) == 600
    assert patience_s(1800.0) == 5400


def test_data_that_another_process_reads_otherwise_are_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert cli.main(["check", "train:bad", "--workdir", str(tmp_path)]) == 2
    shown = "".join(capsys.readouterr())
    assert "Training.dataset: samples " in shown
    assert "in the job's order are others in another process" in shown
    assert "Sort what has no order" in shown
