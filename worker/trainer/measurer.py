"""A trainer before its job has a recipe: it surveys the model, measures its share, and probes links."""

from __future__ import annotations

import logging
import threading

from ...model.training import Training
from ...protocol.messages import MeasureOrder, Orders, Phase, ProbeOrder, ProbeReport, Profile, SectionRow
from ..execution.blocking import Abandoned, BlockingThread, Interrupt, Interrupted
from ..execution.gloo import Listener, connect
from ..profiling.probe import Found, probe
from ..profiling.profiling import SURVEY_S, begin, subject_of
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
        self._surveyed = False
        self._rows: dict[tuple[int, int], SectionRow] = {}
        self._listener: tuple[int, Listener] | None = None
        self._probed = 0
        self._lock = threading.Lock()  # guards what the control thread touches
        self._running: tuple[int, Interrupt] | None = None

    def has_work(self, orders: Orders) -> bool:
        if orders.recipe is not None or orders.job is None:
            return False
        return (
            self._must_survey(orders)
            or self._share(orders) is not None
            or self._must_listen(orders.probe)
            or self._must_probe(orders.probe)
        )

    def work(self, orders: Orders, training: Training) -> None:
        """Do one thing that the orders ask for. Raises what is wrong with the user's code."""
        assert orders.job is not None, "a trainer is started for a job"
        share, order = self._share(orders), orders.probe
        if self._subject is None:
            self._subject = subject_of(training, orders.job)
        if self._must_survey(orders):
            self._survey(self._subject)
        elif share is not None:
            self._measure(self._subject, share)
        elif order is not None and self._must_listen(order):
            self._listen(order)
        elif order is not None:
            self._probe(order)

    def finish(self) -> None:
        """There is a recipe: forget what was measured, here and in the reports."""
        self._subject = None
        self._rows.clear()
        if self._listener is not None:
            self._listener[1].close()
            self._listener = None
        self._control.report(profile=None, survey=None, rows=[], probe=None)

    def on_orders(self, orders: Orders) -> None:
        """Give up a probe that is not wanted any more."""
        with self._lock:
            running = self._running
        if running is not None and (orders.probe is None or orders.probe.number != running[0]):
            running[1].trip(Abandoned())

    # ---- the model -----------------------------------------------------------------------------------------

    def _must_survey(self, orders: Orders) -> bool:
        return orders.action == "profile" and orders.profile_worker == self._worker and not self._surveyed

    def _survey(self, subject: Subject) -> None:
        self._control.report(phase=Phase.PROFILING)
        found = begin(subject, seconds=SURVEY_S)
        self._surveyed = True
        if isinstance(found, Profile):
            self._control.report(phase=Phase.IDLE, profile=found)
        else:
            self._control.report(phase=Phase.IDLE, survey=found)

    def _share(self, orders: Orders) -> MeasureOrder | None:
        """The first order for this worker of which something is left to measure."""
        for order in orders.measure:
            if order.worker == self._worker and self._left(order):
                return order
        return None

    def _left(self, order: MeasureOrder) -> list[int]:
        m = order.layout.microbatch_size
        return [section for section in order.sections if (m, section) not in self._rows]

    def _measure(self, subject: Subject, order: MeasureOrder) -> None:
        self._control.report(phase=Phase.PROFILING)
        subject.cut_exactly(order.layout)
        for section in self._left(order):
            row = subject.measure(section, order.section_s)
            self._rows[row.microbatch_size, section] = row
        self._control.report(phase=Phase.IDLE, rows=list(self._rows.values()))

    # ---- links ---------------------------------------------------------------------------------------------

    def _rank(self, order: ProbeOrder) -> int | None:
        names = [member.worker for member in order.members]
        return names.index(self._worker) if self._worker in names else None

    def _must_listen(self, order: ProbeOrder | None) -> bool:
        if order is None or order.endpoint is not None or self._rank(order) != 0:
            return False
        return self._listener is None or self._listener[0] != order.number

    def _listen(self, order: ProbeOrder) -> None:
        if self._listener is not None:
            self._listener[1].close()
        listener = Listener(self._address)
        self._listener = order.number, listener
        self._control.report(probe=ProbeReport(number=order.number, endpoint=listener.endpoint))

    def _must_probe(self, order: ProbeOrder | None) -> bool:
        if order is None or order.endpoint is None or order.number <= self._probed:
            return False
        rank = self._rank(order)
        # One who replaces the listener, which is dead, must not answer for it.
        listens = self._listener is not None and self._listener[0] == order.number
        return rank is not None and (rank > 0 or listens)

    def _probe(self, order: ProbeOrder) -> None:
        rank, endpoint = self._rank(order), order.endpoint
        assert rank is not None, "asked before"
        assert endpoint is not None, "asked before"
        self._probed = order.number
        interrupt = Interrupt()
        with self._lock:
            self._running = order.number, interrupt
        listener, self._listener = self._listener, None
        workers = [member.worker for member in order.members]

        def measure() -> Found:
            store = listener[1].serve() if listener is not None else connect(endpoint)
            found = probe(store, rank, workers, self._address)
            # Rank 0 has the store: it leaves last.
            store.set(f"left/{rank}", "")
            if rank == 0:
                store.wait([f"left/{other}" for other in range(len(workers))])
            return found

        failure, found = "", Found()
        courier = BlockingThread(f"probe-{order.number}", interrupt)
        self._control.report(phase=Phase.PROFILING)
        try:
            if self._control.orders is not None:
                self.on_orders(self._control.orders)
            found = courier.call(measure)
        except Interrupted as error:
            failure = f"{type(error).__name__}: {error}"
            log.warning("probe %d: %s", order.number, failure)
        finally:
            with self._lock:
                self._running = None
            courier.close()
        report = ProbeReport(
            number=order.number,
            done=True,
            failure=failure,
            wires=[wire.to_json() for wire in found.wires],
            allreduces=[entry.to_json() for entry in found.allreduces],
        )
        self._control.report(phase=Phase.IDLE, probe=report)
