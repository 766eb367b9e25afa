"""One run, killed by SIGKILL 100 times at random moments: nothing that was saved is ever lost.

The moments are drawn from the seed KILLS_SEED; what hits them is the machine.
"""

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardtrain.archive import find_archives
from shardtrain.metrics import read_jsonl

KILLS = int(os.environ.get("KILLS", "100"))
SEED = int(os.environ.get("KILLS_SEED", "2026"))
MORE = 3  # steps of the last life, which nobody kills
EVERY = 2  # steps between saves


@dataclass
class Killer:
    """Begins lives and kills them.

    Args:
      lives: see `lives.py`.
      random: draws the moments.
    """

    lives: Any
    random: random.Random
    promised: int = 0
    in_saves: int = 0
    kinds: dict = field(default_factory=dict)
    start_seconds: float = 1.0
    run: str = "tiny.py"
    weights: tuple = (20, 20, 60)
    save_seconds: float = 0.05

    def life(self):
        """Begin, kill, and listen to what it had told."""
        kind = self.random.choices(("start", "steps", "save"), self.weights)[0]
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        part, number = self.random.random(), self.random.choice((1, 1, 2))
        began = time.monotonic()
        pid = self.lives.begin(run=self.run, changes={})
        told = []
        if kind == "start":
            time.sleep(part * self.start_seconds)
        else:
            self.listen(told, "began", 1)
            self.start_seconds = time.monotonic() - began
            self.listen(told, "saving" if kind == "save" else "saved", number)
            # a little longer than it takes, for the name comes last
            time.sleep(part * (1.2 * self.save_seconds if kind == "save" else STEP_SECONDS))
        os.kill(pid, signal.SIGKILL)
        while not told or told[-1][0] != "ended":
            told.append(self.lives.told())
        self.lives.life = None
        self.judge(told)

    def listen(self, told, name, number):
        """Until a life has told this so often."""
        while number:
            told.append(self.lives.told())
            assert told[-1][0] != "ended", self.lives.printed()[-5000:]
            began = time.monotonic() if told[-1][0] == "saving" else None
            number -= told[-1][0] == name
            self.times(told[-1][0], began)

    def times(self, name, began):
        if began is not None:
            self.began = began
        elif name == "saved":
            self.save_seconds = 0.8 * self.save_seconds + 0.2 * (time.monotonic() - self.began)

    def judge(self, told):
        """It began where the ones before had come to, and no further than they could have."""
        assert told[-1] == ["ended", str(-signal.SIGKILL)], told
        steps = {name: [int(words[0]) for key, *words in told if key == name] for name in NAMES}
        for step in steps["began"]:
            assert self.promised <= step <= self.promised + EVERY, (told, self.promised)
            self.promised = step
        self.promised = max([self.promised, *steps["saved"]])
        self.in_saves += len(steps["saving"]) > len(steps["saved"])


STEP_SECONDS = 0.02
NAMES = ("began", "saving", "saved")


def arrays(folder):
    """Of the newest checkpoint, by path."""
    archive = find_archives(folder / "checkpoints")[-1]
    assert archive.problems() == []
    return archive.step, {path: archive.read(path) for path in archive.leaves}


def lines(folder):
    """The metrics without what depends on the clock."""
    return [
        {name: value for name, value in line.items() if "per_second" not in name}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]


def test_a_run_that_is_killed_a_hundred_times_is_as_if_it_never_was(lives, cheap):
    print(f"seed {SEED}")  # noqa: T201
    lives.begin(run="tiny.py", changes={"run_dir": "filled", "steps": 2})
    assert lives.ended() == 0, lives.printed()
    killer = Killer(lives, random.Random(SEED))
    for _ in range(KILLS):
        killer.life()
    print(killer.kinds, f"{killer.in_saves} during a save, step {killer.promised}")  # noqa: T201
    assert killer.in_saves >= KILLS // 3
    assert killer.promised >= KILLS // 4

    last = killer.promised + MORE
    lives.begin(run="tiny.py", changes={"steps": last})
    assert killer.promised <= int(lives.until("began")[0]) <= killer.promised + EVERY
    assert lives.ended() == 0, lives.printed()
    said = lives.printed()
    assert "broken" not in said
    assert "Traceback" not in said
    assert "WARNING" not in said

    lives.begin(run="tiny.py", changes={"run_dir": "whole", "steps": last})
    assert lives.ended() == 0, lives.printed()
    step, killed = arrays(cheap / "run")
    assert step == last
    _, whole = arrays(cheap / "whole")
    assert killed.keys() == whole.keys()
    for path, array in whole.items():
        np.testing.assert_array_equal(killed[path], array, err_msg=path)
    assert [line["step"] for line in lines(cheap / "run")] == list(range(1, last + 1))
    assert lines(cheap / "run") == lines(cheap / "whole")
    assert names(cheap / "run") == names(cheap / "whole")
    assert names(cheap / "run/checkpoints") == [f"step_{step:08d}" for step in (last - EVERY, last)]


def test_killed_while_a_save_is_copied_from_a_fast_disk(lives, cheap):
    """The copy begins where the save ends; what it had come to is on the fast disk."""
    source = (cheap / "tiny.py").read_text().replace("keep=2", 'keep=2, fast=Path("fast")')
    (cheap / "fast.py").write_text(source.replace('Path("run")', 'Path("copied")'))
    killer = Killer(lives, random.Random(SEED), run="fast.py", weights=(0, 1, 0))
    for _ in range(8):
        killer.life()
    (fast,) = (cheap / "fast").iterdir()
    shared = cheap / "copied/checkpoints"
    copied = find_archives(shared)[-1].step
    assert killer.promised <= find_archives(fast)[-1].step
    # another node has not that disk
    fast.rename(cheap / "lost")
    lives.begin(run="fast.py", changes={"steps": copied + EVERY})
    assert int(lives.until("began")[0]) == copied
    assert lives.ended() == 0, lives.printed()
    assert names(shared) == [f"step_{step:08d}" for step in (copied, copied + EVERY)]
    assert "broken" not in lives.printed()


def names(folder):
    return sorted(path.name for path in folder.iterdir())
