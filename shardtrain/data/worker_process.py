"""How a process that works on data begins: it ends with its parent, and not by signals meant for that.

Next: `workers.py`, `tokenize.py`.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def begin_worker(*ignored: signal.Signals) -> None:
    """Leave signals, which a terminal or batch system sends to all processes, to the parent; end with it.

    Args:
      ignored: the signals.
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
