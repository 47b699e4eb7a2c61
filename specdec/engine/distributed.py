"""Several ranks, one process each: how they are started, told what to run, watched, and ended.

Rank 0 lives in the engine's own process and owns what decides: scheduler, pages, text. The others run the same steps
on their share of the weights: each plan is sent to them before rank 0 launches it, and each computes the same verdict
from the same numbers, so nothing comes back. A rank's life hangs on its pipe: when the other end closes, however that
came about, it ends. Next: build.py, which builds the same engine on every rank.
"""

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

from specdec.engine.engine import Engine
from specdec.engine.logs import set_log_level
from specdec.errors import EngineError, SpecdecError
from specdec.layers.parallel import SINGLE, ParallelGroup
from specdec.messages import GrammarVocabulary, PytorchEngineConfig, SpeculativeConfig
from specdec.plan import StepPlan

HOST = '127.0.0.1'
JOIN_SECONDS = 60.0  # between the first and the last rank to join, once all have started
CLOSE_SECONDS = 10.0
GRACE_SECONDS = 3.0  # for a step under way to notice by itself that a rank is gone

logger = logging.getLogger('specdec')


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What a rank needs to build its part of the engine."""

    rank: int
    port: int
    model_path: str
    config: PytorchEngineConfig
    speculative: SpeculativeConfig | None
    log_level: int


def join_group(rank: int, config: PytorchEngineConfig, port: int, device: torch.device) -> ParallelGroup:
    """Meet the other ranks: gloo on CPU, NCCL on CUDA. A collective that one of them does not join fails after
    `rank_timeout` seconds.
    """
    if config.tp == 1:
        return SINGLE
    patience = timedelta(seconds=JOIN_SECONDS)
    store = dist.TCPStore(HOST, port, config.tp, is_master=rank == 0, timeout=patience, wait_for_workers=False)
    if device.type == 'cuda':
        handle = dist.ProcessGroupNCCL(store, rank, config.tp, timedelta(seconds=config.rank_timeout))
    else:
        handle = dist.ProcessGroupGloo(store, rank, config.tp, timedelta(seconds=config.rank_timeout))
    return ParallelGroup(rank, config.tp, handle)


class Ranks:
    """The other ranks, seen from rank 0."""

    def __init__(self, model_path: str, config: PytorchEngineConfig, speculative: SpeculativeConfig | None) -> None:
        self.port = _free_port()
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None  # called some seconds after a rank has died
        self._noticed = threading.Event()
        self._timeout = config.rank_timeout
        self._closed = False
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context('spawn')
        for rank in range(1, config.tp):
            mine, theirs = context.Pipe()
            level = logging.getLogger('specdec').level
            arguments = RankArguments(rank, self.port, model_path, config, speculative, level)
            process = context.Process(
                target=run_rank, args=(theirs, arguments), name=f'specdec-rank-{rank}', daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        threading.Thread(target=self._watch, name='specdec-ranks', daemon=True).start()

    def meet(self) -> None:
        """Wait, however long it takes, until every rank has come as far; then all go on. EngineError if one dies."""
        for pipe, process in zip(self._pipes, self._processes):
            wait([pipe, process.sentinel])
            try:
                pipe.recv()
            except (EOFError, OSError):
                self._note_death(process)
        self.check()
        for pipe in self._pipes:
            pipe.send(None)

    def explain(self, error: RuntimeError) -> Exception:
        """A step that failed: what a rank died of, or that one did not take part in time."""
        self._noticed.wait(GRACE_SECONDS)
        if self.failure is None and 'imed out' in str(error):
            self.failure = f'a rank did not take part in a step within rank_timeout={self._timeout:g} seconds'
            logger.error('%s', self.failure)
        return error if self.failure is None else EngineError(self.failure)

    def tell(self, message: StepPlan | GrammarVocabulary) -> None:
        """Every rank gets it, in order. EngineError if one of them is dead."""
        self.check()
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError:
            self.check()
            raise EngineError('a rank does not listen any more') from None

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)

    def close(self) -> None:
        """Closing the pipes ends the ranks; one that does not is killed."""
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(CLOSE_SECONDS)
            if process.is_alive():
                logger.warning('%s does not end; it is killed', process.name)
                process.kill()
                process.join()

    def _watch(self) -> None:
        """Waits for the first rank that ends before it should."""
        ended = wait([process.sentinel for process in self._processes])
        if self._closed:
            return
        self._note_death(next(process for process in self._processes if process.sentinel in ended))
        time.sleep(GRACE_SECONDS)
        if not self._closed:
            self.on_failure()

    def _note_death(self, process: multiprocessing.process.BaseProcess) -> None:
        process.join(CLOSE_SECONDS)
        code = process.exitcode
        how = f'killed by {signal.Signals(-code).name}' if code is not None and code < 0 else f'exit status {code}'
        if self.failure is None and not self._closed:
            self.failure = f'{process.name.removeprefix("specdec-").replace("-", " ")} ended unexpectedly ({how})'
            logger.error('%s', self.failure)
        self._noticed.set()


def run_rank(connection: Connection, arguments: RankArguments) -> None:
    """A rank's program: builds its part of the engine, then runs every plan it is sent, until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for rank 0, whose end closes the pipe
    set_log_level(logging.getLevelName(arguments.log_level or logging.WARNING))
    inbox: queue.SimpleQueue[StepPlan | GrammarVocabulary | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), name='specdec-inbox', daemon=True).start()

    def meet() -> None:
        connection.send(None)
        inbox.get()

    from specdec.engine.build import build_rank

    try:
        meet()
        _follow(build_rank(arguments, meet), inbox)
    except SpecdecError as error:
        logger.error('rank %d: %s', arguments.rank, error)  # rank 0 finds the same, and says so
    except BaseException:
        logger.exception('rank %d failed', arguments.rank)
    os._exit(1)


def _follow(engine: Engine, inbox: queue.SimpleQueue) -> None:
    launched = None
    while True:
        message = inbox.get()
        if isinstance(message, StepPlan):
            previous, launched = launched, engine.agent.launch(message)
            if previous is not None:
                engine.agent.read(previous)  # whoever reads, waits: so a rank is never more than a step ahead
        else:
            engine.set_vocabulary(message)


def _receive(connection: Connection, inbox: queue.SimpleQueue) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]
