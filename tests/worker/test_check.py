"""`makara check`: what ties a model's parts together outside its graph is found and named; what does not,
passes."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import control_flow
import coupled_models
import frozen_models
import models
import pytest
import torch
import tying_optimizers
import user_models
from coupled_models import Net, sound
from makara.manager.cli import main as cli
from makara.model.errors import UntraceableModel, UserCodeError
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.worker import Training
from makara.worker.check.check import CheckSettings, check
from makara.worker.check.comparison import watch_for
from makara.worker.check.findings import Report
from makara.worker.check.memory import Needs
from makara.worker.check.optimizers import check_optimizer
from torch import nn
from zoo_names import ZOO_NAMES

FOLDER = Path(__file__).parents[1]
SUPPORT = FOLDER / "support"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    coupled_models.SHARED.clear()
    coupled_models.table.cache_clear()
    coupled_models.KNOB["scale"] = 1.0


def examine(training: Training, **settings: Any) -> dict[str, Any]:
    return check(training, CheckSettings(**settings), FOLDER)


def findings(training: Training) -> list[str]:
    return [finding["text"] for finding in examine(training)["findings"]]


@pytest.fixture(scope="module")
def chain() -> Sections:
    """Of the model that all have whose fault is elsewhere."""
    traced = trace(sound(), 1)
    return split(traced, choose_cuts(traced))


def of_optimizer(optimizer: Callable[..., Any], chain: Sections) -> list[str]:
    training = sound(optimizer=optimizer)
    report = Report()
    check_optimizer(training, chain, watch_for(training, FOLDER), report)
    return [str(finding) for finding in report.findings]


# ---- what passes -------------------------------------------------------------------------------------------


def with_custom_functions() -> Training:
    return sound(model=lambda: Net(coupled_models.Custom))


class Expanded(Net):
    """One number in memory for all elements of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((1,), 0.5).expand(8, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.offset


def with_an_expanded_buffer() -> Training:
    return sound(model=Expanded)


def with_a_loss_that_writes_into_its_batch() -> Training:
    """The targets are counted from 0 on."""

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["targets"].sub_(1).remainder_(output.shape[-1])
        return models.last_token_loss(output, batch)

    return dataclasses.replace(models.untied_mlp(), loss=loss)


class Noisy(torch.optim.SGD):
    """Adds noise to each gradient."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        super().step()


def with_a_noisy_optimizer() -> Training:
    return sound(optimizer=lambda named: Noisy(named, lr=0.1))


@pytest.mark.parametrize(
    "build",
    [
        sound,
        with_a_loss_that_writes_into_its_batch,
        models.skip_model,
        with_custom_functions,
        with_an_expanded_buffer,
        with_a_noisy_optimizer,
    ],
)
def test_a_model_without_hidden_dependencies_is_its_pieces(build: Callable[[], Training]) -> None:
    report = examine(build())
    assert report["findings"] == []
    assert report["not_compared"] is None
    assert max(report["largest_differences"].values()) < 1e-6


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_models_that_users_bring_are_their_pieces(name: str) -> None:
    stated = {"microbatch_size": 1} if name == "moe" else {}  # its balance of loads is over a micro-batch
    report = examine(user_models.ZOO[name](0.1), **stated)
    assert report["findings"] == []
    assert report["not_compared"] is None
    assert max(report["largest_differences"].values()) < 1e-6
    assert not any("attention" in operation for operation in report["random_operations"])
    if name == "resnet":
        assert report["buffers"]["norm.running_mean"] == "mean over micro-batches"
        assert report["buffers"]["norm.num_batches_tracked"] == "advances once a step"
        assert "buffer" in report["largest_differences"]


@pytest.mark.parametrize(
    "optimizer",
    [
        tying_optimizers.Lamb,  # norms per parameter tie nothing
        lambda named: tying_optimizers.Remembering(
            named, lr=0.1
        ),  # a number of its own travels with the section
        torch.optim.Adafactor,
        torch.optim.RMSprop,
        lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        lambda named: torch.optim.AdamW(
            [
                {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": 0.1},
                {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
            ]
        ),
    ],
)
def test_optimizers_that_look_at_one_parameter_at_a_time_pass(
    chain: Sections, optimizer: Callable[..., Any]
) -> None:
    assert of_optimizer(optimizer, chain) == []


@pytest.mark.parametrize("loss", [coupled_models.masked_sum, coupled_models.masked_alike])
def test_a_declared_weight_passes(loss: Callable[..., Any]) -> None:
    assert findings(sound(loss=loss)) == []


@pytest.mark.parametrize(
    "settings", [{"microbatch_size": 2}, {"global_batch_size": 1}], ids=["stated", "whole"]
)
def test_samples_that_depend_on_each_other_are_noted_where_the_size_is_known(
    settings: dict[str, int],
) -> None:
    report = examine(sound(loss=coupled_models.coupled), **settings)
    assert report["findings"] == []
    assert "depend on each other" in report["notes"][0]


@pytest.mark.parametrize("run", [True, False], ids=["compared", "not compared"])
@pytest.mark.parametrize("loss", [coupled_models.coupled, coupled_models.pairs])
def test_a_loss_over_pairs_of_samples_is_refused_where_speed_would_choose_its_size(
    loss: Callable[..., Any], run: bool
) -> None:
    """Found: it was trained on micro-batches of one, which have no pairs, without a word."""
    (found,) = examine(sound(loss=loss), global_batch_size=8, compare=run)["findings"]
    assert found["where"] == "Training.loss"
    assert "depend on each other" in found["differs"]
    assert "State parallelism.microbatch_size" in found["remedy"]
    assert "training.global_batch_size (8)" in found["remedy"]


@pytest.mark.parametrize("layer", [coupled_models.Mates, coupled_models.Centred])
def test_a_forward_that_looks_at_other_samples_is_refused_likewise(layer: Callable[[], nn.Module]) -> None:
    (found,) = examine(sound(model=lambda: Net(layer)), global_batch_size=8)["findings"]
    assert found["where"] == "the model's forward"
    assert "depend on each other" in found["differs"]


def test_a_loss_that_adds_means_over_different_counts_is_refused_with_what_to_return() -> None:
    """Found: its samples were said to depend on each other, which they do not."""
    (found,) = examine(sound(loss=coupled_models.two_means), global_batch_size=8)["findings"]
    assert found["where"] == "Training.loss"
    assert "or the loss adds means over different counts" in found["differs"]
    assert "divide each term by the number of samples, or return (sum, weight)" in found["remedy"]


def test_loss_and_forward_are_both_named_where_outputs_cannot_be_joined() -> None:
    """Found: forward was blamed."""
    training = sound(model=coupled_models.TimeFirst, loss=coupled_models.coupled_time_first)
    (found,) = examine(training, global_batch_size=8)["findings"]
    assert found["where"] == "Training.loss or the model's forward"


def test_a_loss_of_each_sample_alone_passes_unrun() -> None:
    report = examine(sound(loss=coupled_models.masked_sum), global_batch_size=8, compare=False)
    assert report["findings"] == []


@pytest.mark.parametrize(
    "training",
    [
        sound(loss=coupled_models.noisy),
        sound(model=coupled_models.Codebook, loss=coupled_models.near, average_buffers=["table"]),
        sound(model=lambda: Net(coupled_models.Distributed)),
    ],
    ids=["noise", "table", "distributions"],
)
def test_noise_buffers_that_move_and_distributions_tie_no_samples(training: Training) -> None:
    report = examine(training)
    assert report["findings"] == []
    assert report["notes"] == []


def test_an_integer_tensor_is_raised_to_a_power_in_place() -> None:
    """Found: `pow_.Scalar` was taken for `pow.Scalar`, which takes its arguments the other way round."""
    assert findings(sound(model=lambda: Net(coupled_models.Powers))) == []


def test_the_report_says_what_the_model_is() -> None:
    report = examine(models.untied_mlp(), num_sections=3)
    assert report["num_sections"] == len(report["sections"]) == 3
    assert report["unused_parameters"] == ["unused"]
    assert report["sections"][-1]["cut_bytes_per_sample"] is None
    assert report["sections"][0]["cut_bytes_per_sample"] > 0
    assert sum(section["num_parameters"] for section in report["sections"]) >= report["num_parameters"]


def test_the_report_says_which_sections_get_no_gradient() -> None:
    report = examine(frozen_models.probe(), num_sections=6)
    assert report["findings"] == []
    assert 0 < report["frozen_sections"] < 6
    assert examine(models.untied_mlp())["frozen_sections"] == 0


def test_weights_that_are_tied_after_construction_pass() -> None:
    def tied() -> Net:
        model = Net()
        model.out.weight = model.embed.weight
        return model

    report = examine(sound(model=tied))
    assert report["findings"] == []
    assert report["tied_parameters"] == {"out.weight": "embed.weight"}
    assert list(report["shared_parameters"]) == ["embed.weight"]


def test_a_job_in_another_precision_is_cut_in_it_and_compared_in_fp32() -> None:
    plain, half = examine(sound()), examine(sound(), precision="bf16")
    assert half["findings"] == []
    assert half["largest_differences"] == plain["largest_differences"]
    assert half["sections"][2]["cut_bytes_per_sample"] <= plain["sections"][2]["cut_bytes_per_sample"]


def test_attention_in_half_precision_is_timed_as_it_runs() -> None:
    """Found: attention was priced without autocast, so `apply` refused a Llama in bf16: its
    queries are fp32, and its values are not."""
    traced = trace(user_models.llama(0.0), 1, precision="bf16")
    assert Needs(split(traced, choose_cuts(traced, 2))).seconds() > 0


def test_weights_of_few_bits_are_clipped_by_the_norm_before_rounding() -> None:
    """Found: the comparison rounded gradients to bf16 and then clipped them, and blamed the optimizer."""

    def clipped(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=1.0)

    training = sound(model=lambda: Net().bfloat16(), optimizer=clipped, clip_grad_norm=0.05)
    assert findings(training) == []


def test_a_step_that_would_take_too_long_is_left_out_and_said() -> None:
    report = examine(
        sound(optimizer=lambda named: tying_optimizers.Lamb(named, over_all=True)), max_seconds=0.0
    )
    assert "makara check" in report["not_compared"]
    assert report["largest_differences"] == {}
    assert len(report["findings"]) == 1  # small optimizers cost nothing


# ---- what is caught ----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "a LAMB with a global norm": (
        lambda named: tying_optimizers.Lamb(named, over_all=True),
        ("'layers.0.norm.weight'", "depends on the gradient of 'embed.weight'", "Training(clip_grad_norm="),
    ),
    "clipping of its own": (
        lambda named: tying_optimizers.ClippingSGD(named, lr=0.1),
        ("clip_grad_norm_ at", "tying_optimizers.py", "Training(clip_grad_norm=0.5)"),
    ),
    "state in a global": (
        lambda named: tying_optimizers.Counting(named, lr=0.1),
        ("the class attribute tying_optimizers.Counting.shared", "self.state[parameter]"),
    ),
    "skipped steps": (
        lambda named: tying_optimizers.Skipping(named, lr=0.1),
        ("when the gradient of 'embed.weight' overflows", "training.precision: fp16"),
    ),
    "a loss scaler": (
        lambda named: tying_optimizers.Scaled(named, lr=0.1),
        ("torch.amp.GradScaler at", "tying_optimizers.py", "training.precision: fp16"),
    ),
    "options by place": (
        tying_optimizers.by_place,
        ("an option or the result depends on the order", "from its own name or shape"),
    ),
}


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_an_optimizer_that_ties_sections_is_named(chain: Sections, what: str) -> None:
    optimizer, said = OPTIMIZERS[what]
    found = of_optimizer(optimizer, chain)
    assert found
    assert all(text.startswith("Training.optimizer: ") for text in found)
    for text in said:
        assert text in found[0]


def timed(named: Any) -> torch.optim.Optimizer:
    """Its hook notes a time in the state of each parameter, which hosts of a section compare."""
    optimizer = torch.optim.SGD(named, lr=0.1)

    def note(made: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in made.param_groups:
            for parameter in group["params"]:
                made.state[parameter]["time"] = time.perf_counter()

    optimizer.register_step_post_hook(note)
    return optimizer


def test_state_of_an_optimizer_that_differs_between_hosts_is_named(chain: Sections) -> None:
    """Found: hosts of a section were taken for hosts with wrong memory, again and again."""
    (found,) = of_optimizer(timed, chain)
    assert found.startswith("Training.optimizer: its state in 'optimizer/")
    assert "/time'" in found
    assert "has other bits in two optimizers that take the same steps" in found


LOSSES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "a mean over unequal numbers": (
        coupled_models.masked_mean,
        ("do not count alike", "0.5 : 0.5", "Return (sum, weight)"),
    ),
    "a sum": (coupled_models.total, ("2 times", "Return a mean over the samples")),
    "a mean with the weight of a sum": (coupled_models.mean_and_count, ("returns (sum, weight)", "is a sum")),
    "memory": (coupled_models.Annealed(), ("for the same output and batch", "the batch alone")),
    "a loss scaler": (coupled_models.scaled, ("torch.amp.GradScaler at", "training.precision: fp16")),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_is_no_mean_is_named(what: str) -> None:
    loss, said = LOSSES[what]
    found = findings(sound(loss=loss))
    assert len(found) == 1
    assert found[0].startswith("Training.loss: ")
    for text in said:
        assert text in found[0]


def net(layer: Callable[[], nn.Module]) -> Callable[[], Training]:
    return lambda: sound(model=lambda: Net(layer))


MODELS: dict[str, tuple[Callable[[], Training], tuple[str, ...]]] = {
    "an activation kept in an attribute": (
        net(coupled_models.Recurring),
        ("'layers.0.before'", "coupled_models.py:", "Compute from arguments"),
    ),
    "a number kept in an attribute": (
        net(coupled_models.Calls),
        ("'layers.0.calls'", "coupled_models.py:", "Compute from arguments"),
    ),
    "a value handed on through a global": (
        net(coupled_models.Through),
        ("stores a tensor in the global coupled_models.SHARED", "Pass the value on as an argument"),
    ),
    "a global that the loss turns": (
        lambda: sound(model=coupled_models.Turned, loss=coupled_models.turning),
        ("the loss of micro-batch 0", "the whole model (Turned, ", "changes the global coupled_models.KNOB"),
    ),
    "a buffer that is changed": (net(coupled_models.History), ("layers.0.seen", "average_buffers")),
    "weights tied in forward": (lambda: sound(model=coupled_models.Tying), ("weight", "in the constructor")),
    "Python's random numbers": (lambda: sound(model=coupled_models.Lucky), ("random", "torch.rand")),
    "a backward that reads a clock": (
        net(coupled_models.Restless),
        (
            "the losses agree, but the gradients",
            "when the same step is run again",
            "a function of its arguments",
        ),
    ),
    "a clock": (net(coupled_models.Clock), ("Your module alone gives another loss", "a clock")),
    "a tensor in a cache": (
        net(coupled_models.Cached),
        ("stores a tensor in the global coupled_models.table", "Pass the value on"),
    ),
    "a sparse matrix": (net(coupled_models.Sparse), ("a sparse tensor", "Use dense", "coupled_models.py:")),
    "a scripted module": (
        net(coupled_models.scripted),
        ("'layers.0' is scripted", "without torch.jit.script"),
    ),
    "a loader in place of data": (
        lambda: sound(dataset=lambda: torch.utils.data.DataLoader(coupled_models.Data())),
        ("returns a DataLoader; return the dataset",),
    ),
    "a list of dicts in a sample": (
        lambda: sound(dataset=coupled_models.Detections),
        ("dataset[0]['boxes']", "got a list of dict", "an entry of its own"),
    ),
    "three values from the loss": (
        lambda: sound(loss=coupled_models.three),
        ("Training.loss: it returns 3 values; expected a scalar tensor",),
    ),
    "a loss and how sure the model is": (
        lambda: sound(loss=coupled_models.and_confidence),
        ("Training.loss: computed from the model's output, its second value", "Return the loss alone"),
    ),
    "a loss and a dict of metrics": (
        lambda: sound(loss=coupled_models.and_metrics),
        ("Training.loss: a dict, its second value is taken for a weight", "without metrics"),
    ),
    "an optimizer and a scheduler": (
        lambda: sound(optimizer=tying_optimizers.with_scheduler),
        ("tuple with a learning rate scheduler", "Training(schedule=lambda step: ...)"),
    ),
    "a module in place of a function": (
        lambda: sound(model=Net()),
        ("got the module Net; write model=lambda: Net(...)",),
    ),
    "a device": (lambda: sound(model=lambda: Net().cuda()), ("Leave devices out of your code",)),
    "a hook of a module": (net(coupled_models.Hooked), ("'layers.0' (Hooked)", "hook")),
    "a hook of a tensor": (net(coupled_models.TensorHooked), ("register_hook", "coupled_models.py:")),
    "hooks that the optimizer leaves": (
        lambda: sound(optimizer=tying_optimizers.clamping),
        ("'embed.weight' has a hook on its gradient, clamping", "tying_optimizers.py:", "in the optimizer"),
    ),
}


@pytest.mark.parametrize("max_seconds", [None, 0.0], ids=["compared", "not compared"])
@pytest.mark.parametrize("loss", [coupled_models.and_accuracy, coupled_models.of_hard_samples])
def test_a_weight_that_follows_the_output_is_noted(
    loss: Callable[..., Any], max_seconds: float | None
) -> None:
    """It may be a metric, or the number of the samples that the loss chose, which is right."""
    report = examine(sound(loss=loss), max_seconds=max_seconds)
    assert [note for note in report["notes"] if "its second value follows the model's output" in note]


def test_a_loss_that_chooses_its_samples_passes() -> None:
    assert findings(sound(loss=coupled_models.of_hard_samples)) == []


def test_a_micro_batch_may_have_nothing_that_counts() -> None:
    assert findings(sound(loss=coupled_models.of_even_rows)) == []


def test_a_schedule_is_asked_for_all_steps_of_the_job() -> None:
    """Found: a list of 20 factors ended a job of 30 steps at its twentieth."""
    factors = [1.0] * 20
    training = sound(schedule=lambda step: factors[step])
    assert examine(training, steps=20)["findings"] == []
    with pytest.raises(UserCodeError, match=r"Training\.schedule\(29\): IndexError"):
        examine(training, steps=30)
    with pytest.raises(UserCodeError, match=r"Training\.schedule\(7\): it gives nan"):
        examine(sound(schedule=lambda step: math.nan if step == 7 else 1.0), steps=10)


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_is_more_than_its_graph_is_named(what: str) -> None:
    build, said = MODELS[what]
    try:
        told = "\n".join(findings(build()))
    except (TypeError, UntraceableModel, UserCodeError) as error:  # what needs no step is told before one
        told = str(error)
    for text in said:
        assert text in told


def test_data_that_changes_when_it_is_read_again_is_named() -> None:
    (found,) = findings(sound(dataset=coupled_models.Drawn))
    assert found.startswith("Training.dataset: entry 'tokens' of a sample is another")


# ---- the command -------------------------------------------------------------------------------------------


def run(folder: Path, source: str, *options: str) -> int:
    path = f"import sys\nsys.path.append({str(SUPPORT)!r})\n"
    (folder / "train.py").write_text(f"{path}import coupled_models\n\n\ndef build():\n    return {source}\n")
    return cli.main(["check", "train:build", "--workdir", str(folder), *options])


def test_the_command_shows_a_table_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "coupled_models.sound()", "--microbatch-size", "2", "--num-sections", "4") == 0
    shown = capsys.readouterr().out
    assert "1,744 parameters (float32), 4 sections, micro-batches of 2" in shown
    assert "stages: at most 4 (P); to cut finer: parallelism.num_sections (up to " in shown
    assert "or more names in Training.cuts" in shown
    assert "both steps drew the same numbers" in shown
    assert "one step in pieces is your module's" in shown


def test_the_command_names_what_differs_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "coupled_models.sound(loss=coupled_models.masked_mean)", "--json") == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"].startswith("Training.loss: it returns a mean")
    assert answer["model"]["findings"][0]["remedy"].startswith("Return (sum, weight)")


def test_the_command_needs_an_entrypoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == 2
    assert "module:function" in capsys.readouterr().err
    assert cli.main(["check", "train:build", "--workdir", str(tmp_path / "none")]) == 2


def once(layer: type[nn.Module]) -> Callable[[], Training]:
    class Small(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([layer()])

    return lambda: sound(model=Small)


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("layer", [control_flow.Branches, control_flow.Scans, control_flow.Maps])
def test_a_model_with_control_flow_of_torch_is_its_pieces(layer: type[nn.Module]) -> None:
    """Found: the check broke off."""
    report = examine(once(layer)(), num_sections=2)
    assert report["findings"] == []
    assert report["not_compared"] is None
    assert max(report["largest_differences"].values()) < 1e-6
