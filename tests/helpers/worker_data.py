"""Sources for tests of worker processes, which import them by name."""

import os
import signal

import numpy as np


class Words:
    """Samples of unequal lengths, which draw and say which process they were made in."""

    lengths = [1 + i % 7 for i in range(40)]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"tokens": np.full(self.lengths[index], index)}

    def augmented(self, index, epoch, random):
        return {**self[index], "drawn": random.random(), "weights": np.float32(1), "process": os.getpid()}


class Failing(Words):
    """Samples of which one ends its process, and the others raise."""

    def augmented(self, index, epoch, random):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError(f"no word {index}")


class Unpicklable(Words):
    """Samples with a function that has no name."""

    def __init__(self):
        self.words = lambda: None
