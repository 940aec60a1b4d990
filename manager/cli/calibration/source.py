"""Sources of a job's calibration for commands: a file, a manager, or this machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ....simulator import Calibration, Measurements
from ....simulator.calibration.microbatch_size import best_microbatch_size, rows_for_job
from ...spec.job_spec import JobSpec, JobSpecError, to_settings
from ...spec.reading import read_file
from ..client import RequestRefused, connect
from ..user_code import measured_apart


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """Measurements, and in words where they come from."""

    measured: Measurements
    where: str

    def calibration(self, spec: JobSpec, memory_bytes: int | None, most_workers: int) -> Calibration:
        """The calibration for the job's m, else for the best measured m. Raises `JobSpecError` if they do not
        fit the job."""
        usable = rows_for_job(self.measured.rows, spec.training.global_batch_size, most_workers)
        m = spec.parallelism.microbatch_size or best_microbatch_size(usable, memory_bytes)
        found = self.measured.at(m)
        if spec.training.global_batch_size % m:
            batch = spec.training.global_batch_size
            raise JobSpecError(
                [("training.global_batch_size", f"{batch} is not divisible by the m that was measured ({m})")]
            )
        num_sections = spec.parallelism.num_sections
        if num_sections not in (None, found.num_sections):
            message = f"{num_sections}, but the calibration ({self.where}) is of {found.num_sections}"
            raise JobSpecError([("parallelism.num_sections", message)])
        return found


def of_file(path: Path) -> CalibrationSource:
    """Read a file. Raises `BadFile`."""
    return CalibrationSource(read_file(path, Measurements.from_json), str(path))


def of_manager(options: argparse.Namespace, name: str) -> CalibrationSource | None:
    """Get those of the newest measured job of this name. Raises `Unreachable`."""
    with connect(options) as client:
        for job in client.get_all("/jobs", "jobs", "offset")["jobs"]:
            if job["name"] != name:
                continue
            try:
                value = client.get(f"/jobs/{job['job']}/calibration")
            except RequestRefused as error:
                if error.status != 404:  # it is not measured yet
                    raise
                continue
            return CalibrationSource(
                Measurements.from_json(value), f"measured on the VMs of job {job['job']}"
            )
    return None


def of_this_machine(spec: JobSpec, workdir: Path, budget_s: float) -> CalibrationSource:
    """Measure for about `budget_s` seconds. Raises `UserCodeRefused`."""
    measured = measured_apart(workdir, to_settings(spec, spec.name, ""), budget_s, spec.envs)
    return CalibrationSource(measured, f"measured on this machine in {measured.seconds:.1f} s")
