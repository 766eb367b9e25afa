"""Load batches in worker processes; any process can load any batch, so their number changes no batch.

Threads of `batches.py` wait for them. Grain's own worker processes outlive a parent that is killed, and each
owns every n-th batch.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardtrain.data.samples import Batch
from shardtrain.errors.user_code import UserCodeFailed, user_traceback
from shardtrain.system.stop_signals import STOPPING

if TYPE_CHECKING:
    from shardtrain.data.batches import Batches
    from shardtrain.data.token_batches import TokenBatches

END_SECONDS = 5.0
"""Time that a worker has to finish its batch before it is killed, once no more batches are needed."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _Failure(NamedTuple):
    """An error in a worker, and its traceback as text."""

    error: Exception
    trace: str


class WorkerTraceback(Exception):
    """The traceback in a worker, as the cause of an error that it raised."""


class Workers:
    """Worker processes, which run while this context is entered.

    Args:
      batches: the batches to load; each process gets a copy.
      number: number of processes.
      source: the data; it is given the rows that the copies have skipped.

    Raises:
      ValueError: the data cannot be copied to other processes.
    """

    def __init__(self, batches: "Batches | TokenBatches", number: int, source: Any) -> None:
        self._source = source
        try:
            self._copy = pickle.dumps(batches)
        except Exception as error:  # any object of the user's may be in it
            raise ValueError(_explain_not_copied(type(batches.source).__name__, error)) from error
        self._number = number
        self._all: list[_Worker] = []
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._over = False

    def __enter__(self) -> Self:
        # before multiprocessing itself ends processes at the exit, by a signal that workers ignore
        atexit.register(self._kill)
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        try:
            for number in range(self._number):
                ours, theirs = context.Pipe()
                name = f"shardtrain data worker {number}"
                process = context.Process(target=_serve, args=(theirs,), name=name, daemon=True)
                process.start()
                theirs.close()
                self._all.append(_Worker(process, ours))
                self._free.put(self._all[-1])
            for worker in self._all:
                worker.pipe.send_bytes(self._copy)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise _make_ended_error(self._all[-1].process) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        atexit.unregister(self._kill)
        self._over = True
        deadline = time.monotonic() + END_SECONDS
        # a thread may be about to write to a pipe; were it closed now, the file that is opened next could get
        # its number, and that message
        idle = [self._take(deadline) for _ in self._all]
        for worker in idle:
            worker.pipe.close()
            self._free.put(worker)  # threads that wait for one see that it is over
        for process, _pipe in self._all:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _take(self, deadline: float) -> _Worker:
        """Return a worker that no thread uses; after the deadline kill all workers, which frees them."""
        try:
            return self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            self._kill()
            return self._free.get()

    def _kill(self) -> None:
        for process, _pipe in self._all:
            process.kill()

    def load(self, position: Any) -> Batch:
        """Load the batch at a position in the next free worker; any number of threads may call this.

        Raises:
          ChildProcessError: the worker ended.
          RuntimeError: the workers were ended, and nothing waits for this batch.
          ValueError, UserCodeFailed: see `Batches.load`.
        """
        worker = self._free.get()
        try:
            if self._over:
                raise RuntimeError("the worker processes were ended")
            worker.pipe.send(position)
            found = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise _make_ended_error(worker.process) from error
        finally:
            self._free.put(worker)  # one that ended says so to the next thread as well
        if isinstance(found, _Failure):
            raise found.error from WorkerTraceback(f"in a worker process:\n{found.trace}")
        batch, skipped = found
        if skipped:
            self._source.add_skipped(skipped)
        return batch


def _explain_not_copied(data: str, error: Exception) -> str:
    return (
        f"the data ({data}) cannot be copied to worker processes ({error}); define its classes and functions"
        " at the top of an importable file, open files when they are read, or use --loading.workers 0"
    )


def _make_ended_error(process: BaseProcess) -> ChildProcessError:
    """Return the error for a worker that has ended unexpectedly."""
    process.join(END_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        why = f"was ended by {name}" + (" (memory may have run out)" if name == "SIGKILL" else "")
    else:
        why = f"ended with exit code {code}; what it wrote is above"
    return ChildProcessError(
        f"{process.name}, a process that loads batches, {why}. The same command resumes; fewer"
        " --loading.workers need less memory, and with 0 the run loads by itself. A program of your own"
        " that trains by workers begins with if __name__ == '__main__'"
    )


def _serve(pipe: Connection) -> None:
    """Load batches until the parent closes the pipe."""
    begin_worker(*STOPPING)
    try:
        batches = _copy_batches(pipe.recv_bytes())
        while True:
            position = pipe.recv()
            try:
                if isinstance(batches, Exception):
                    raise batches
                skipped = getattr(batches.source, "skipped_rows", None)
                pipe.send((batches.load(position), skipped))
            except (EOFError, BrokenPipeError):
                raise
            except Exception as error:
                pipe.send(_make_failure(error))
    except (EOFError, OSError):
        pass  # nothing more is wanted


def _copy_batches(copy: bytes) -> Any:
    """Unpickle the batches of this worker, or return the error."""
    try:
        return pickle.loads(copy)
    except Exception as error:
        return ValueError(_explain_not_copied("its classes or files", error))


def _make_failure(error: Exception) -> _Failure:
    if isinstance(error, UserCodeFailed):
        return _Failure(UserCodeFailed(str(error)), user_traceback(error))
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # it cannot be sent as it is
        return _Failure(RuntimeError(f"{type(error).__name__}: {error}"), trace)
    return _Failure(error, trace)


def begin_worker(*ignored: signal.Signals) -> None:
    """Prepare a worker process: ignore signals that a terminal sends to all, and end with the parent.

    Args:
      ignored: the signals, which the parent handles.
    """
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerators are the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
