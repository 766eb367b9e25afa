"""A message that cannot be sent ends the run at its stage's next call, instead of a thread in silence."""

import time
from typing import Any

import numpy as np
import pytest

from shardtrain.islands.bridge import MPI
from shardtrain.islands.mailbox import Mailbox


class Broken:
    """A communicator whose sends fail after they have begun."""

    rank = 0

    def Dup(self):
        return self

    def Get_attr(self, key):
        return 100

    def Isend(self, *message):
        return self

    def Test(self):
        raise MPI.Exception(MPI.ERR_OTHER)


def send_again(mailbox):
    """Until the thread of the mailbox has told of its failure."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        mailbox.send(np.ones(1), 1, 1)
        time.sleep(0.01)


@pytest.mark.parametrize("array", [np.ones(3), "no array"], ids=["a send that fails", "no array"])
def test_what_cannot_be_sent_is_raised_at_the_next_call(array):
    broken: Any = Broken()
    mailbox = Mailbox(broken, ["stage 0", "stage 1"])
    if isinstance(array, str):
        array = np.array([{}], dtype=object)  # has no bytes
    mailbox.send(array, 1, 0)
    with pytest.raises(RuntimeError, match="could not be computed or sent to another stage"):
        send_again(mailbox)
    mailbox.close()
    assert not mailbox._thread.is_alive()
