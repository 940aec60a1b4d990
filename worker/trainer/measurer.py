"""A trainer before its job has a recipe: it takes part in generations of kind `profile`."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ...model.training import Training
from ...protocol.messages import At, GenerationOrder, Orders, Phase, Profiling
from ..execution.blocking import GenerationAbandoned, Interrupted
from ..execution.communicator import Communicator
from ..execution.gloo import Listener
from ..profiling.generation import MeasuredSoFar, measure_together
from ..profiling.profiling import subject_of
from ..profiling.subject import Subject
from .agent_pipe import AgentPipe

log = logging.getLogger("makara.trainer")


class Measurer:
    """Used by the trainer's main thread; `on_orders` by its control thread."""

    def __init__(self, worker: str, address: str, control: AgentPipe) -> None:
        self._worker = worker
        self._address = address
        self._control = control
        self._subject: Subject | None = None
        self._known = MeasuredSoFar()
        self._entered = 0  # the newest generation that it went into
        self._left: Communicator | None = None  # the one before: slower members may still need its store
        self._lock = threading.RLock()  # guards what the control thread touches: the three below
        self._status = Profiling()
        self._listener: Listener | None = None
        self._comm: Communicator | None = None

    def has_work(self, orders: Orders) -> bool:
        return self._next(orders) is not None

    def work(self, orders: Orders, training: Training) -> None:
        """Go into the generation that the orders name. Raises what is wrong with the user's code."""
        assert orders.job is not None, "a trainer is started for a job"
        if self._subject is None:
            self._subject = subject_of(training, orders.job)
        progress = self._control.progress
        with self._lock:  # a newer one may have been prepared since the orders came
            order = self._next(orders)
            if order is None:
                return
            listener, self._listener = self._listener, None
            comm = Communicator(order, self._worker, listener, orders.link_timeout_s, progress)
            self._comm, self._entered = comm, order.number
        # Not that of the one before: newcomers would wait for links that nobody measures yet.
        stage = "survey" if self._known.survey is None else "sections"
        self._report(generation=order.number, broken="", stage=stage, phase=Phase.PROFILING, profile=None)
        if self._control.orders is not None:
            self.on_orders(self._control.orders)
        if self._left is not None:
            self._left.close()
        found, broken = None, ""
        try:
            with progress.being(At.COMPUTING):
                found = measure_together(
                    comm,
                    self._subject,
                    self._known,
                    lambda stage, done, total: self._report(stage=stage, done=done, total=total),
                    measuring_s=orders.measuring_s,
                    probe_s=orders.probe_s,
                )
            comm.leave()
        except GenerationAbandoned as cause:
            cause.__traceback__ = None  # its frames would keep the generation's groups
        except Interrupted as cause:
            log.warning("profile %d: %s", comm.number, cause)
            broken, cause.__traceback__ = str(cause), None
        finally:
            with self._lock:
                self._comm = None
            comm.close()
            self._left = comm
        self._report(broken=broken, phase=Phase.IDLE, profile=found)

    def finish(self) -> None:
        """There is a recipe: forget what was measured, here and in the reports."""
        self._subject, self._known, self._left = None, MeasuredSoFar(), None
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
        self._control.report(profile=None, profiling=None)

    def _next(self, orders: Orders) -> GenerationOrder | None:
        """The generation that this trainer should go into now, for which it must have got ready."""
        order = self._ordered(orders)
        if order is None or order.phase != "go" or order.number <= self._entered:
            return None
        return order if order.number == self._status.prepared else None

    def _ordered(self, orders: Orders) -> GenerationOrder | None:
        order = orders.generation
        if order is None or order.kind != "profile" or orders.recipe is not None:
            return None
        return order if self._worker in order.ranks else None

    def _report(self, **changes: Any) -> None:
        """Change what the worker reports, of `Profiling` and beside it."""
        with self._lock:
            own = {name: changes.pop(name) for name in list(changes) if name in Profiling.model_fields}
            self._status = self._status.model_copy(update=own)
            self._control.report(profiling=self._status, **changes)

    # ---- the control thread --------------------------------------------------------------------------------

    def on_orders(self, orders: Orders) -> None:
        """Get ready for a generation that is planned, and leave one that is not wanted any more."""
        order = self._ordered(orders)
        if order is not None and order.phase == "prepare":
            self._prepare(order)
        with self._lock:
            comm = self._comm
        if comm is None:
            return
        # While the next one is prepared this one goes on.
        goes_on = order is not None and (order.number == comm.number or order.phase == "prepare")
        if not goes_on:
            comm.interrupt.trip(GenerationAbandoned())

    def _prepare(self, order: GenerationOrder) -> None:
        with self._lock:
            if order.number <= self._status.prepared:
                return
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            if order.first == self._worker:
                self._listener = Listener(self._address)
                self._listener.serve()  # others may come while this one still measures a section
            endpoint = self._listener.endpoint if self._listener is not None else None
            self._report(prepared=order.number, endpoint=endpoint)
