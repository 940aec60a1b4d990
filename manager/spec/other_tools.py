"""Where keys of other tools belong in a job file: SkyPilot's, dstack's, torchrun's, Trainer's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from ...simulator.validation import fields_of

_LEFT_OUT = "leave it out: makara starts the trainers and tells each its rank"
_GPUS = "resources.instance_type says which GPUs a cloud's VM has, resources.workers_per_node how many"
_LOOP = "the code: `entrypoint` names a function that returns a makara.worker.Training, not a command"
_LENGTH = "training.steps, counted in optimizer steps of training.global_batch_size samples"
_PLANNED = "leave it out: the planner chooses the plan; `parallelism` can fix parts of it"

# Keys without their "_", "-" and capitals, separated by blanks; where they belong.
_TABLE = {
    "accelerators gpu gpus numgpus acceleratorcount": _GPUS,
    "cloud infra backend backends": "resources.provider",
    "regions": "resources.region",
    "zone availabilityzone": "resources.zones",
    "instancetypes machinetype vmtype vmsize": "resources.instance_type",
    "cpus memory mem shmsize": "resources.instance_type, and resources.device_memory at most per worker",
    "numnodes nodes nnodes replicas numworkers worldsize": "resources.max_nodes (and resources.min_nodes)",
    "nprocpernode taskspernode numprocesses gpuspernode devices": "resources.workers_per_node",
    "spot spotpolicy preemptible": "resources.use_spot",
    "disksize disk": "resources.disk_gb",
    "imageid docker dockerimage container": "resources.image",
    "maxhourlyprice": "resources.max_hourly_cost",
    "run command commands script entry main args cmd": _LOOP,
    "env environment environmentvariables": "envs",
    "filemounts files repos workingdir workdirectory codedir": "workdir",
    "jobrecovery maxrestarts retries maxretries restarts backofflimit": "retry.max_restarts_on_errors",
    "masteraddr masterport rdzvendpoint rdzvbackend rdzvid noderank rank localrank": _LEFT_OUT,
    "learningrate lr weightdecay optim adambeta1 adambeta2 betas momentum": "the code: Training.optimizer",
    "lrschedulertype scheduler lrscheduler warmupsteps warmupratio warmup": "the code: Training.schedule",
    "maxgradnorm gradientclipping gradclip clipgradnorm gradientclipval": "the code: Training.clip_grad_norm",
    "modelname modelnameorpath": "the code: Training.model",
    "datasetname trainfile trainingdata datapath": "the code: Training.dataset",
    "numtrainepochs epochs maxepochs numepochs maxsteps totalsteps iterations maxiters trainsteps": _LENGTH,
    "perdevicetrainbatchsize trainbatchsize batchsize": "training.global_batch_size, of all devices together",
    "microbatch trainmicrobatchsizepergpu": "parallelism.microbatch_size",
    "gradientaccumulationsteps accumulategradbatches": "leave it out: it follows from global_batch_size",
    "bf16 fp16 mixedprecision dtype torchdtype amp": "training.precision",
    "gradientcheckpointing activationcheckpointing": "parallelism.recompute",
    "deepspeed fsdp zero strategy": _PLANNED,
    "pipelineparallelsize pp ppsize": "parallelism.pipeline_parallel_degree",
    "dataparallelsize dp dpsize": "parallelism.data_parallel_degree",
    "tensorparallelsize tensorparalleldegree tp tpsize": "leave it out: layers are not split among devices",
    "outputdir savedir checkpointdir defaultrootdir ckptdir bucket storage": "checkpoint.uri",
    "savesteps saveinterval checkpointinterval saveevery": "checkpoint.interval",
    "savetotallimit keeplast": "checkpoint.keep_latest_k",
    "resumefromcheckpoint resume loadcheckpoint ckptpath": "checkpoint.start_from",
}
_BELONGS = {word: where for words, where in _TABLE.items() for word in words.split()}
_COMMAND = re.compile(r"(?:.*\s)?(?:python[\d.]*|torchrun|accelerate|deepspeed|bash|sh|srun|uv)\b.*")


def belongs(key: str, form: type[BaseModel]) -> str | None:
    """Where an unknown key belongs in the file, or in the code; None if that is not known."""
    elsewhere = [path for path in _paths(form, "") if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    where = _BELONGS.get(re.sub(r"[^a-z0-9]", "", key.lower()))
    if where is None:
        return None
    return where if where.startswith("leave") else f"that belongs in {where}"


def not_a_command(entrypoint: str) -> str:
    """What to write in place of a command or a file as the entrypoint; empty if it is neither."""
    file = re.search(r"(?:^|[\s/])([A-Za-z_]\w*)\.py(?:\s|$)", entrypoint)
    module = file[1] if file else "train"
    if _COMMAND.fullmatch(entrypoint) is None or ":" in entrypoint.rpartition(" ")[2]:
        return ""
    return (
        f"{entrypoint!r} is a command, and none is run; expected module:function, as {module}:build: a "
        f"function in {module}.py that returns a makara.worker.Training (model, loss, optimizer, dataset)"
    )


def _paths(form: Any, prefix: str) -> Iterator[str]:
    """Every key of the form, with those that it is in."""
    for name, field in fields_of(form).items():
        yield f"{prefix}{name}"
        yield from _paths(field.annotation, f"{prefix}{name}.")
