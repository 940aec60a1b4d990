"""The trainer: the process that holds a worker's part of the model and trains it, generation after
generation.

The main thread computes. It looks at the newest orders, makes what they ask for true, and waits for the
next; only the thread of `agent_pipe` and named helpers run beside it.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from ...checkpoint import CheckpointError
from ...model.errors import RecipeMismatch, UntraceableModel, UserCodeError, WorkerError
from ...model.tracebacks import whole
from ...model.tracing.trace import load_exporter
from ...model.training import Training, load_entrypoint
from ...protocol.messages import (
    TRAINER_PROTOCOL,
    At,
    Failure,
    GenerationOrder,
    Orders,
    Phase,
    Profiling,
    WorkerReport,
)
from ..execution.blocking import GenerationAbandoned, Interrupted, PeersLost
from ..execution.commit import ANY_GENERATION
from ..execution.gloo import Listener
from ..execution.replicas import CorruptState
from ..execution.session import Session
from ..recovery.joining import NoCheckpoint
from ..stacks import ALL_THREADS, MAIN_THREAD
from .agent_pipe import AgentPipe
from .generation import run_generation
from .measurer import Measurer
from .model import Model, build_model

log = logging.getLogger("makara.trainer")

FAILED = 1  # exit status after a failure that was reported
_LAST_REPORT_S = 60.0  # for an agent that does not read to read why the trainer ends


class Trainer:
    """One process's life. `serve` never returns; the agent ends the process."""

    def __init__(self, connection: socket.socket, worker: str, incarnation: int, bundle: Path, address: str):
        self.worker = worker
        self._bundle = bundle
        self._address = address
        report = WorkerReport(
            worker=worker,
            incarnation=incarnation,
            phase=Phase.STARTING,
            trainer_protocol=TRAINER_PROTOCOL,
            profiling=Profiling(),
        )
        self.control = AgentPipe(connection, report, self._on_orders)
        self._training: Training | None = None
        self._model: Model | None = None
        self._measurer = Measurer(worker, address, self.control)
        self._lock = threading.Lock()  # guards what the control thread touches: the three below
        self._session: Session | None = None
        self._listener: Listener | None = None
        self._prepared = 0
        self._entered = 0  # the newest generation that this trainer went into
        self._accused: frozenset[int] = frozenset()  # ranks, by what broke the last generation
        self._left: Session | None = None
        """The one before. If it was interrupted, its threads may still be blocked; if not, slower members may
        still need its store, until they have formed a newer generation."""

    def serve(self) -> None:
        self.control.start()
        while True:
            orders = self.control.wait_for(self._has_work)
            self._work(orders)

    # ---- the main thread -------------------------------------------------------------------------------

    def _has_work(self, orders: Orders) -> bool:
        return (
            (orders.job is not None and self._training is None)
            or (self._training is not None and self._measurer.has_work(orders))
            or (orders.recipe is not None and self._model is None)
            or self._next_generation(orders) is not None
            or self._has_lost_more()
        )

    def _work(self, orders: Orders) -> None:
        assert orders.job is not None, "a trainer is started for a job"
        if self._training is None:
            self._training = load_entrypoint(self._bundle, orders.job.entrypoint)
            load_exporter()
            self.control.report(phase=Phase.IDLE)
        elif self._measurer.has_work(orders):
            self._measurer.work(orders, self._training)
        elif orders.recipe is not None and self._model is None:
            self._measurer.finish()
            self.control.report(phase=Phase.STARTING)
            self._model = build_model(self._training, orders.job, orders.recipe)
            self.control.report(
                phase=Phase.IDLE,
                graph_hash=orders.recipe.graph_hash,
                bits_hash=self._model.bits_hash,
                kernels_hash=self._model.kernels_hash,
            )
            self._prepare(self.control.orders or orders)
        elif self._has_lost_more() and self._left is not None:
            self.control.report(lost=self._lost_in(self._left))
        else:
            self._train(orders)

    def _next_generation(self, orders: Orders) -> GenerationOrder | None:
        """The generation that this trainer should switch to now, if there is one.

        It must have got ready for just this one. A trainer that replaces a dead one finds the orders of its
        predecessor: taking part in its name, it would contradict what members have read already.
        """
        order = orders.generation
        if order is None or order.phase != "go" or self._model is None or not self._names_me(order):
            return None
        fresh = order.number > max(self._entered, orders.abandoned)
        return order if fresh and order.number == self._prepared else None

    def _train(self, orders: Orders) -> None:
        model = self._model
        with self._lock:  # a newer generation may have been prepared since the orders came
            order = self._next_generation(orders)
            if order is None or model is None or orders.job is None or orders.recipe is None:
                return  # `_has_work` looks again
            listener, self._listener = self._listener, None
            progress = self.control.progress
            session = Session(
                order, self.worker, listener, orders.link_timeout_s, progress, self.control.wake
            )
            self._session, self._entered = session, order.number
        newest = self.control.orders
        if newest is not None and newest.abandoned >= order.number:
            session.interrupt.trip(GenerationAbandoned())
        self.control.report(phase=Phase.FORMING, generation=order.number, formed=None, lost=[])
        if self._left is not None:
            self._left.close()  # not before: peers would take it for a death of this worker
        try:
            with progress.being(At.COMPUTING):
                ended = run_generation(
                    session, model, orders.job, orders.recipe, self.control, self._may_switch
                )
        except Interrupted as cause:
            self._tell_interrupted(session, cause)
            cause.__traceback__ = None  # its frames would keep the generation's groups
        else:
            session.close()
            self._settle(ended)
        finally:
            self._left = session
            with self._lock:
                self._session = None

    def _tell_interrupted(self, session: Session, cause: Interrupted) -> None:
        orders = self.control.orders
        match cause:
            case GenerationAbandoned():
                self.control.report(phase=Phase.IDLE)
            case PeersLost() if orders is not None and orders.abandoned >= session.number:
                self.control.report(phase=Phase.IDLE)  # its peers have only left it sooner
            case PeersLost():
                log.warning("generation %d: %s", session.number, cause)
                self._accused = frozenset(cause.ranks)
                self.control.report(phase=Phase.BROKEN, lost=self._lost_in(session))
            case CorruptState():
                log.error("generation %d: %s", session.number, cause)
                assert self._model is not None, "it has trained"
                self._model.state.distrust(session.number)
                self._accused = frozenset()
                closed = orders is not None and orders.abandoned >= session.number
                phase = Phase.IDLE if closed else Phase.BROKEN
                self.control.report(phase=phase, lost=[], corruption=cause.corruption)
                # Afterwards: a test on a faulty processor may raise.
                if self.worker in cause.corruption.suspects and self._model.bits_hash is not None:
                    self.control.report(bits_hash=self._model.tested_bits())
            case _:
                raise AssertionError(f"an interruption of no known kind: {cause!r}")

    def _lost_in(self, session: Session) -> list[str]:
        """Who is known to be lost of a generation that broke: some may have been lost right after that."""
        return [session.members[rank] for rank in sorted(self._accused | session.interrupt.lost)]

    def _has_lost_more(self) -> bool:
        """Whether more members of the generation that broke are lost than were reported."""
        told, session = self.control.last_report, self._left
        return told.phase is Phase.BROKEN and session is not None and told.lost != self._lost_in(session)

    def _settle(self, ended: Phase | None) -> None:
        if ended is not None:
            self.control.report(phase=ended)
        elif self.control.orders is None or self._next_generation(self.control.orders) is None:
            self.control.report(phase=Phase.IDLE)  # the others went on without it

    def _may_switch(self) -> int:
        """The newest generation that this trainer is prepared for and was told to switch to; asked by each
        vote."""
        orders = self.control.orders
        if orders is None:
            return self._entered
        order = self._next_generation(orders)
        if order is not None:
            return order.number
        # Its orders name no generation any more: a newer one was opened that does without this worker.
        return self._entered if orders.generation is not None else ANY_GENERATION

    # ---- the control thread ----------------------------------------------------------------------------

    def _on_orders(self, orders: Orders) -> None:
        self._prepare(orders)
        self._measurer.on_orders(orders)
        with self._lock:
            session = self._session
        if session is not None and orders.abandoned >= session.number:
            session.interrupt.trip(GenerationAbandoned())

    def _prepare(self, orders: Orders) -> None:
        """Get ready for a planned generation: traced already, and on rank 0 listening."""
        order = orders.generation
        with self._lock:
            if (
                order is None
                or order.phase != "prepare"
                or self._model is None
                or order.number <= max(self._prepared, orders.abandoned)
                or not self._names_me(order)
            ):
                return
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            endpoint = None
            if order.first == self.worker:
                self._listener = Listener(self._address)
                endpoint = self._listener.endpoint
            self._prepared = order.number
        self.control.report(prepared=order.number, endpoint=endpoint)

    def _names_me(self, order: GenerationOrder) -> bool:
        return order.kind == "train" and self.worker in order.ranks


def failure_of(error: BaseException) -> Failure:
    """How a trainer's end is told: whose fault it is, and the traceback to show. Of what the user's code
    raised that is the part in it; the log has the whole one."""
    text = whole(error)
    match error:
        case UserCodeError() | UntraceableModel():
            return Failure(kind="user", message=str(error), traceback=error.traceback)
        case RecipeMismatch():
            return Failure(kind="recipe", message=str(error))
        case NoCheckpoint():
            return Failure(kind="unreadable", message=str(error))
        case WorkerError() | CheckpointError():
            return Failure(kind="internal", message=str(error), traceback=text)
        case _:
            return Failure(kind="internal", message=f"{type(error).__name__}: {error}", traceback=text)


def main() -> None:
    """`python -m makara.worker.trainer`, started by the agent with one end of a socket pair."""
    parser = argparse.ArgumentParser(prog="makara.worker.trainer")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--address", required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run(socket.socket(fileno=args.fd), args.worker, args.incarnation, args.bundle, args.address)


def run(connection: socket.socket, worker: str, incarnation: int, bundle: Path, address: str) -> NoReturn:
    """Be a trainer until the process ends."""
    # The agent asks so for the stacks: a handler in C writes them also while the interpreter is held.
    faulthandler.register(ALL_THREADS, file=sys.stderr, all_threads=True)
    faulthandler.register(MAIN_THREAD, file=sys.stderr, all_threads=False)
    trainer = Trainer(connection, worker, incarnation, bundle, address)
    try:
        trainer.serve()
    except Exception as error:
        log.exception("the trainer ends")
        trainer.control.report(phase=Phase.EXITED, failure=failure_of(error))
        trainer.control.flush(_LAST_REPORT_S)
    # Threads of abandoned generations may be blocked for ever: no orderly exit would come to an end.
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(FAILED)
