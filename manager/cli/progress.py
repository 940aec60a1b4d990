"""A job's progress on a terminal: one bar, and a line for each morph."""

from __future__ import annotations

from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

from .costs.shown import usd

_FIELDS = ("loss", "rate", "shape", "doing")
# Fields that managers of earlier versions do not have, with defaults.
_LATER: dict[str, Any] = {
    "doing": "",
    "isolated": None,
    "stalled": None,
    "notes": (),
    "max_nodes": 0,
    "secrets": (),
    "cost": None,
}
_LATER_OF_VM: dict[str, Any] = {"notice": "", "cost": None}
_LATER_OF_WAITING: dict[str, Any] = {"unsaved_steps": None, "start_from": None, "console": ""}


def completed(view: dict[str, Any]) -> dict[str, Any]:
    """A job's view with defaults for fields that an older manager lacks."""
    vms, waiting = [{**_LATER_OF_VM, **vm} for vm in view["vms"]], view.get("waiting")
    if waiting:
        waiting = {**_LATER_OF_WAITING, **waiting}
    return {**_LATER, "num_vms": len(vms), **view, "vms": vms, "waiting": waiting}


class ProgressText:
    """Prints each morph of a job once its first step is done, and each question to a person."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting_since: float | None = None  # when the printed question began
        self._told = ""
        self._shown: set[int] = set()  # generations whose morph was printed

    def show(self, view: dict[str, Any]) -> bool:
        """Print what is new in a job's view, which is `completed`; returns whether there are new morphs."""
        since = view["waiting"]["since"] if view["waiting"] else None
        if since is not None and since != self._waiting_since:
            for line in (view["reason"], *answers(view)):
                self.print(line)
        self._waiting_since = since
        new = [
            morph
            for morph in view["morphs"]
            if "first_step" in morph["phases_s"] and morph["generation"] not in self._shown
        ]
        for morph in new:
            self._shown.add(morph["generation"])
            self.print(describe_morph(morph))
        return bool(new)

    def tell(self, line: str) -> None:
        """Print a line about the plan that runs, unless it was the last such line."""
        if line and line != self._told:
            self._told = line
            self.print(line)

    def print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


class ProgressDisplay:
    """A context manager that shows progress on a terminal; pass it job views, and steps if available."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # `ps` needs none

        self._text = ProgressText(console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed:.0f}/{task.total}"),
            *(TextColumn(f"{{task.fields[{name}]}}") for name in _FIELDS),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=None, **dict.fromkeys(_FIELDS, ""))

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, view: dict[str, Any]) -> bool:
        """Show a job's view, and print new morphs whose first step is done; returns whether there are any."""
        view = completed(view)
        fields = fields_of(view)
        self._progress.update(
            self._task,
            description=f"{view['status']:<9}",
            total=view["steps"],
            completed=view["step"],
            loss=fields["loss"],
            rate=fields["rate"],
            shape=fields["shape"],
            doing=fields["doing"],
        )
        return self._text.show(view)

    def tell(self, line: str) -> None:
        """Print a line about the plan that runs, unless it was the last such line."""
        self._text.tell(line)

    def show_step(self, step: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=step["step"], loss=loss_of(step))


def fields_of(view: dict[str, Any]) -> dict[str, str]:
    """The texts of `_FIELDS`."""
    return {
        "loss": loss_of(view),
        "rate": "" if view["samples_per_s"] is None else f"{view['samples_per_s']:.0f} samples/s",
        "shape": f"{view['shape']} (PxD)" if view["shape"] else "",
        "doing": view["doing"],
    }


def answers(job: dict[str, Any]) -> list[str]:
    """The possible answers to a job that waits for a person, one line each."""
    job = completed(job)
    start = job["waiting"]["start_from"]
    begin = "begin at step 0" + (f", NOT from {start}" if start else "")
    about = {
        "again": "try again, once the cause is put right",
        "from_head": "go on from what the head in the store lists",
        "restart": f"{begin}; the checkpoints that are listed are deleted",
    }
    options = {"again": "", "from_head": " --from-head", "restart": " --restart"}
    lines = [f"makara resume {job['job']}{options[o]:<12}  {about[o]}" for o in job["waiting"]["offers"]]
    lines += _at_stake(job)
    lines += console_lines(job["waiting"]["console"])
    return lines


def console_lines(console: str) -> list[str]:
    """The console output of the last VM that did not join, marked as untrusted text."""
    if not console:
        return []
    return ["the end of what the last of them wrote:", *(f"  | {line}" for line in console.splitlines())]


def how_it_goes_on(job: dict[str, Any]) -> str:
    """Where a job that was stopped or failed would continue, and what that needs."""
    job = completed(job)
    newest = job["checkpoints"][0]["step"] if job["checkpoints"] else 0
    if newest >= job["steps"]:
        return "exports its weights"
    # Only the workers read it whole: that it is damaged is found when they load it.
    older = job["checkpoints"][1]["step"] if len(job["checkpoints"]) > 1 else None
    unless = "" if older is None else f" (step {older} if that checkpoint is damaged)"
    vms = counted(job["max_nodes"], "VM")
    where = f"goes on from step {newest} of {job['steps']}{unless} with up to {vms}"
    named = ", ".join(job["secrets"])
    sends = f"; sends {named} of your environment again" if named else ""
    return where + sends + _budget_left(job)


def _budget_left(job: dict[str, Any]) -> str:
    cost = job["cost"]
    if cost is None or cost["budget"] is None:
        return ""
    return (
        f"; of its budget of {usd(cost['budget'])} {usd(cost['budget_left'])} is left, --budget says another"
    )


def ways_on(job: dict[str, Any]) -> list[str]:
    """What a user can do about a job that was stopped or failed, one line each."""
    newest = job["checkpoints"][0]["step"] if job["checkpoints"] else 0
    resume = f"makara resume {job['job']}  {how_it_goes_on(job)}"
    if job["status"] != "failed" or newest >= job["steps"]:
        return [resume]
    mended = "makara apply -f job.yaml  with mended code or settings: a new job"
    if newest:
        mended += f", from step {newest} with checkpoint.start_from: {job['job']}"
    return [mended, f"{resume}, with the code and settings as they were"]


def _at_stake(job: dict[str, Any]) -> list[str]:
    """What a waiting job may lose, and when."""
    lines: list[str] = []
    vms_until, unsaved = job["waiting"]["vms_until"], job["waiting"]["unsaved_steps"]
    if job["num_live_vms"] and vms_until is None:
        lines.append("its VMs are kept as long as its generation steps, which can publish checkpoints")
    elif job["num_live_vms"]:
        until = datetime.fromtimestamp(vms_until)
        lines.append(f"its VMs are kept until {until:%m-%d %H:%M:%S}, then saved from and released")
    if unsaved is not None:
        steps = f"step {unsaved[0]}" if unsaved[0] == unsaved[1] else f"steps {unsaved[0]} to {unsaved[1]}"
        held = "only its VMs hold them" if job["num_live_vms"] else "no VM holds them any more"
        lines.append(f"{steps} cannot be saved as things are, and {held}")
    return lines


def describe_morph(morph: dict[str, Any]) -> str:
    """One line: the change of shape, its cause, where the state came from, and where the time went."""
    taken = {name: f"{1000 * seconds:.0f}" for name, seconds in morph["phases_s"].items()}
    first = taken.pop("first_step", None)
    phases = "  ".join(f"{name} {ms}" for name, ms in taken.items())
    if first is not None:
        phases += f"; then the {'rest of the step' if morph.get('in_flight') else 'first step'} {first}"
    change = f"{morph['before']} -> {morph['shape']}" if morph["before"] else f"start as {morph['shape']}"
    lost = f", {counted(morph['lost_steps'], 'step')} done again" if morph["lost_steps"] else ""
    if morph["step"] is None:
        where = f"{morph['cause']}, not formed"
    else:
        where = f"step {morph['step']}, {morph['cause']}, state from {morph['rung']}{lost}{_kept(morph)}"
    return f"morph {morph['generation']}  {change}  ({where})  ms: {phases}"


def _kept(morph: dict[str, Any]) -> str:
    """What was kept of the step that the morph cut off. A manager of before says nothing of it."""
    step = morph.get("in_flight")
    if not step:
        return ""
    left = step["left"]
    total = step["kept"] + left
    dropped = step.get("dropped")
    short = f", {dropped:.3g} dropped for want of memory" if dropped else ""
    moved = f"{step['moved']:.3g} moved, {left:.3g} left to do{short}"
    kept = f", {step['kept']:.3g} of {total:.0f} micro-batches kept ({moved})"
    took, undisturbed = step.get("took_s"), step.get("undisturbed_s")
    if took is None:
        return kept
    instead = "" if undisturbed is None else f" instead of {undisturbed:.3g}"
    return f"{kept}, the step took {took:.3g} s{instead}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def loss_of(view: dict[str, Any]) -> str:
    return "" if view["loss"] is None else f"loss {view['loss']:.3f}"
