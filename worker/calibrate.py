"""Measures a model on this machine: times and sizes of each section for one micro-batch (Varuna §4.3).

Each section runs on its own, on random values of the shapes that cross its cuts, a few times; medians
count. Nothing depends on P, D or N, so a calibration serves every plan.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..simulator.calibration import Calibration, Link
from .cutting.partition import Sections, Value, choose_cuts, split
from .data import Batches
from .footprint import Footprint, Footprints
from .precision import Precision
from .sections.runtime import Saved, SectionOutput, SectionRuntime
from .sections.sums import GradientSum, new_sum
from .tracing.trace import TracedModel, trace
from .training import Training, call_user_code

REPEATS = 3
_MAX_MICROBATCH_SIZE = 64
_STILL_IMPROVES = 0.93  # a doubling of m must save 7% of the time per sample to be worth its memory
_PROBE_BYTES = 4 << 20


def calibrate(
    chain: Sections,
    training: Training,
    *,
    seed: int,
    numerics: Literal["exact", "fast"],
    num_micro_batches: int,
    device: torch.device | str = "cpu",
    inter_vm: Link | None = None,
    intra_vm: Link | None = None,
    repeats: int = REPEATS,
) -> Calibration:
    """Times (seconds) and sizes (bytes) of each section. Links that are not given: a measurement over
    loopback.

    `numerics` and N decide the size of the gradient sums. One section is in memory at a time.
    """
    m = chain.traced.microbatch_size
    dataset = call_user_code("Training.dataset", training.dataset)
    batch = Batches(dataset, seed, m, m).micro_batch(0, 0)
    measured = [
        _measure(chain, index, training, batch, seed, numerics, num_micro_batches, device, repeats)
        for index in range(chain.num_sections)
    ]
    link = measure_loopback() if inter_vm is None or intra_vm is None else None
    forwards, backwards = _cut_bytes(chain)
    times = {name: tuple(row.times[name] for row in measured) for name in measured[0].times}
    sizes: dict[str, Any] = {name: tuple(row.sizes[name] for row in measured) for name in measured[0].sizes}
    return Calibration(
        forward_s=times["forward_s"],
        backward_s=times["backward_s"],
        optimizer_s=times["optimizer_s"],
        **sizes,
        cut_bytes=forwards,
        grad_cut_bytes=backwards,
        inter_vm=inter_vm or cast(Link, link),
        intra_vm=intra_vm or cast(Link, link),
        device_kind=torch.device(device).type,
        microbatch_size=m,
        versions={"torch": torch.__version__},
        labels=tuple(section.label for section in chain.sections),
    )


def choose_microbatch_size(
    training: Training,
    global_batch_size: int,
    *,
    seed: int = 0,
    precision: Precision = "fp32",
    device: torch.device | str = "cpu",
) -> int:
    """The smallest m = 1, 2, 4, ... dividing the global batch after which a doubling no longer saves 7% of
    the time per sample (Varuna §4.2: the smallest m at which F(m)/m is nearly flat)."""
    best = 1
    best_s = _seconds_per_sample(training, best, seed, precision, device)
    while global_batch_size % (2 * best) == 0 and 2 * best <= min(_MAX_MICROBATCH_SIZE, global_batch_size):
        seconds = _seconds_per_sample(training, 2 * best, seed, precision, device)
        if seconds > _STILL_IMPROVES * best_s:
            break
        best, best_s = 2 * best, seconds
    return best


def measure_loopback() -> Link:
    """Latency and bandwidth of a TCP connection inside this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_echo, args=(server,), name="loopback-echo", daemon=True)
        echo.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trips = [_round_trip_s(connection, 1) for _ in range(20)]
            bulk_s = min(_round_trip_s(connection, _PROBE_BYTES) for _ in range(3))
        echo.join()
    latency_s = statistics.median(round_trips) / 2
    return Link(latency_s=latency_s, bytes_per_s=_PROBE_BYTES / max(bulk_s - 2 * latency_s, 1e-6))


def _cut_bytes(chain: Sections) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What crosses each cut forwards, and the gradients that cross it backwards."""
    forwards = tuple(sum(value.size_bytes for value in values) for values in chain.crossing)
    with_gradient = [[value for value in values if value.needs_grad] for values in chain.crossing]
    return forwards, tuple(sum(value.size_bytes for value in values) for values in with_gradient)


@dataclass(frozen=True, slots=True)
class _Measured:
    """One section's columns of a calibration."""

    times: dict[str, float]
    sizes: dict[str, int]


def _measure(
    chain: Sections,
    index: int,
    training: Training,
    batch: dict[str, Tensor],
    seed: int,
    numerics: Literal["exact", "fast"],
    num_micro_batches: int,
    device: torch.device | str,
    repeats: int,
) -> _Measured:
    section = SectionRuntime(chain, index, training, seed, device)
    sums = new_sum(chain, section.info.trainable, num_micro_batches, numerics, device)
    sums.reset(dict.fromkeys(section.info.trainable, 1.0))
    once = _Passes(chain, section, batch, sums)
    forward_s, backward_s = once.times(repeats, device)
    forward, backward = once.footprints(device)
    coefficient = None if training.clip_grad_norm is None else torch.ones(())
    gradients = sums.finalise(1.0)
    optimizer_s = _median_s(lambda: section.apply(0, gradients, coefficient), repeats, device)
    finalise, update = _update_footprints(section, sums, coefficient, device)
    tensors, _ = section.state()
    saved_bytes = sum(_size(tensor) for tensor in tensors.values())
    whole_batch = section.info.batch or index == chain.num_sections - 1
    return _Measured(
        {"forward_s": forward_s, "backward_s": backward_s, "optimizer_s": optimizer_s},
        {
            "parameter_bytes": sum(_size(parameter) for parameter in section.parameters.values()),
            "gradient_bytes": _size(sums.buffer),
            "state_bytes": saved_bytes + section.fixed_bytes() + _size(sums.buffer),
            "activation_bytes": max(0, forward.kept_bytes),
            "batch_bytes": sum(_size(entry) for entry in batch.values()) if whole_batch else 0,
            "forward_peak_bytes": forward.peak_bytes,
            "backward_peak_bytes": backward.peak_bytes,
            "reduced_bytes": finalise.kept_bytes,
            "update_peak_bytes": max(finalise.peak_bytes - finalise.kept_bytes, update.peak_bytes),
            "snapshot_bytes": saved_bytes,
            "optimizer_bytes": sum(_size(t) for name, t in tensors.items() if name.startswith("optimizer/")),
        },
    )


class _Passes:
    """A section's forward and backward on random values, again and again."""

    def __init__(
        self, chain: Sections, section: SectionRuntime, batch: dict[str, Tensor], sums: GradientSum
    ) -> None:
        self._section = section
        self._batch = batch
        self._sums = sums
        self._values = _random_values(chain, section)
        self._gradients = {name: _random(value) for name, value in _outputs(chain, section).items()}

    def times(self, repeats: int, device: torch.device | str) -> tuple[float, float]:
        """Median seconds of the forward, and of the backward with the adding of gradients."""
        forwards: list[float] = []
        backwards: list[float] = []
        for _ in range(repeats + 1):
            started = _now(device)
            output = self._forward()
            middle = _now(device)
            self._backward(output.saved)
            forwards.append(middle - started)
            backwards.append(_now(device) - middle)
        return statistics.median(forwards[1:]), statistics.median(backwards[1:])

    def footprints(self, device: torch.device | str) -> tuple[Footprint, Footprint]:
        """Memory of the forward, which keeps what the backward needs, and of the backward."""
        with Footprints(device) as memory:
            kept = [self._forward().saved]
            memory.mark()
            self._backward(kept.pop())
            memory.mark()
        forward, backward = memory.phases
        return forward, backward

    def _forward(self) -> SectionOutput:
        return self._section.forward(0, 0, self._values, self._batch)

    def _backward(self, saved: Saved) -> None:
        for name, gradient in self._section.backward(saved, self._gradients)[1].items():
            self._sums.add(name, gradient)


def _update_footprints(
    section: SectionRuntime, sums: GradientSum, coefficient: Tensor | None, device: torch.device | str
) -> tuple[Footprint, Footprint]:
    """Memory of the end of a step, when the optimizer has its state: finalised gradients, their use."""
    with Footprints(device) as memory:
        gradients = sums.finalise(1.0)
        memory.mark()
        section.apply(0, gradients, coefficient)
        memory.mark()
    finalise, update = memory.phases
    return finalise, update


def _random_values(chain: Sections, section: SectionRuntime) -> dict[str, Tensor]:
    known = {value.name: value for value in chain.inputs_of(section.info.index)}
    return {name: _random(known[name]) for name in section.info.inputs}


def _outputs(chain: Sections, section: SectionRuntime) -> dict[str, Value]:
    crossing = chain.outputs_of(section.info.index + 1)
    own = section.info.outputs
    return {value.name: value for value in crossing if value.name in own and value.needs_grad}


def _random(value: Value) -> Tensor:
    if value.torch_dtype.is_floating_point:
        return torch.randn(value.shape, dtype=value.torch_dtype)
    return torch.zeros(value.shape, dtype=value.torch_dtype)  # an index or a mask: zero is always in range


def _seconds_per_sample(
    training: Training, m: int, seed: int, precision: Precision, device: torch.device | str
) -> float:
    """Forward seconds per sample of the section with median work, for micro-batches of m."""
    traced: TracedModel = trace(training, m, seed, precision)
    chain = split(traced, choose_cuts(traced))
    section = SectionRuntime(chain, chain.num_sections // 2, training, seed, device)
    batch = Batches(call_user_code("Training.dataset", training.dataset), seed, m, m).micro_batch(0, 0)
    values = _random_values(chain, section)
    section.forward(0, 0, values, batch)
    times = [_timed(lambda: section.forward(0, 0, values, batch), device) for _ in range(5)]
    return min(times) / m


def _median_s(action: Callable[[], object], repeats: int, device: torch.device | str) -> float:
    action()
    return statistics.median(_timed(action, device) for _ in range(repeats))


def _timed(action: Callable[[], object], device: torch.device | str) -> float:
    started = _now(device)
    action()
    return _now(device) - started


def _now(device: torch.device | str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _round_trip_s(connection: socket.socket, size_bytes: int) -> float:
    """Seconds to send `size_bytes` and get one byte back."""
    started = time.perf_counter()
    connection.sendall(size_bytes.to_bytes(8, "big") + bytes(size_bytes))
    if not connection.recv(1):
        raise ConnectionError("the loopback probe was closed")
    return time.perf_counter() - started


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while header := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "big")
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(b"\x01")
