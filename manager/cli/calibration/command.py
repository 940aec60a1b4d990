"""`makara calibrate`: measures a model on this machine, or shows a job's measurements, as table and plot."""

from __future__ import annotations

import argparse

from ....protocol.messages import JobSettings
from ....simulator import Measurements
from ...spec.job_file import read_job
from ...spec.job_spec import JobSpecError, to_settings
from ...spec.paths import expanded
from ...spec.reading import BadFile, read_file, write_file
from ..client import connect
from ..parsing.option_types import path
from ..user_code import measured_apart
from .picture import draw
from .table import table

_SECONDS = 60.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `makara calibrate`."""
    command.add_argument("job", nargs="?", help="a job of the manager, or a calibration file (JSON)")
    command.add_argument("-f", "--file", type=path, help="a job file: measure its model on this machine")
    command.add_argument("--seconds", type=float, default=_SECONDS, help="about how long (%(default)g)")
    command.add_argument("-m", "--microbatch-size", type=int, metavar="M", help="whose sections are shown")
    command.add_argument("-o", "--output", type=path, help="write the calibration (JSON)")
    command.add_argument("--plot", type=path, help="write a picture (SVG)")
    command.add_argument(
        "--store", action="store_true", help="leave it in the job's store, where its jobs find it"
    )


def calibrate(options: argparse.Namespace) -> int:
    """Measure or fetch, then print, draw, write. Raises `JobSpecError`, `UserCodeRefused`, `BadFile`."""
    if (options.job is None) == (options.file is None):
        raise BadFile("calibrate: give either a job or a calibration file, or -f and a job file")
    if options.file is None:
        measured, name = _known(options), options.job
    else:
        spec, workdir = read_job(options.file)
        settings = to_settings(spec, spec.name, "")
        measured, name = measured_apart(workdir, settings, options.seconds, spec.envs), spec.name
        if options.store:
            _store(settings, measured)
    if options.microbatch_size is not None:
        measured.row(options.microbatch_size)
    if options.output is not None:
        write_file(options.output, measured.to_text())
    if options.plot is not None:
        write_file(options.plot, draw(measured, f"calibration of {name}", options.microbatch_size))
    if options.json:
        print(measured.to_text(), end="")
        return 0
    for line in table(measured, options.microbatch_size):
        print(line)
    return 0


def _known(options: argparse.Namespace) -> Measurements:
    file = expanded(options.job)
    if file.suffix == ".json" or file.exists():
        return read_file(file, Measurements.from_json)
    with connect(options) as client:
        return Measurements.from_json(client.get(f"/jobs/{options.job}/calibration"))


def _store(settings: JobSettings, measured: Measurements) -> None:
    from ....checkpoint import CheckpointError, open_store, save_calibration  # here: other commands need none

    assert measured.basis is not None, "what was measured here says what it depends on"
    where = settings.store
    store = open_store(where.uri, endpoint=where.endpoint, region=where.region)
    try:
        save_calibration(store, measured.basis.fingerprint, measured.to_text())
    except CheckpointError as error:
        raise JobSpecError([("checkpoint.uri", f"cannot store the calibration: {error}")]) from error
