"""Runs, killed 6 times and stopped by signals 4 times, at random moments: nothing is lost.

With `--full` it is 100 times each; KILLS and SIGNALS set other numbers. The moments are drawn from the seed
KILLS_SEED; what the program does at these moments depends on the machine.
"""

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from repeatable_metrics import metrics_of

from shardtrain.checkpoints.reader import find_readers
from shardtrain.system.run_lock import LOCK

SEED = int(os.environ.get("KILLS_SEED", "2026"))
EVERY = 5  # steps between saves: a save is done before the next begins
MORE = 2 * EVERY  # steps of the last life, which nobody kills


@dataclass
class Killer:
    """Begins lives and kills them.

    Args:
      lives: see `lives.py`.
      random: draws the moments.
      kinds: a kind of moment -> how often it is drawn.
      signals: sent in turn; () for SIGKILL.
      words: of the command line; () begins by `train`, which is cheaper.
    """

    lives: Any
    random: random.Random
    kinds: dict[str, int]
    signals: tuple[int, ...] = ()
    words: tuple[str, ...] | list[str] = ()
    promised: int = 0
    codes: Counter = field(default_factory=Counter)
    fell: Counter = field(default_factory=Counter)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"pid": 1.0, "began": 0.3, "saving": 0.05, "evaluating": 0.02}
    )

    def lives_until(self, number, enough):
        """End so many lives, and more until `enough()`: when they end depends on the machine too."""
        while self.codes.total() < number or not enough():
            assert self.codes.total() < 10 * number, (self.fell, self.promised)
            self.life()

    def life(self):
        """Begin, kill, and listen to what it had told."""
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        number = self.random.choice((1, 1, 2)) if kind in ("saving", "saved") else 1
        self.pid = self.lives.begin(**({"words": self.words} if self.words else {"run": RUN, "changes": {}}))
        told, self.last = [["pid"]], time.monotonic()
        while kind != "pid" and number:
            told.append(self.listen(told[-1][0]))
            assert told[-1][0] != "ended", self.lives.printed()[-5000:]
            number -= told[-1][0] == kind
        # a little longer than it takes, for the name of a save comes last
        time.sleep(1.2 * self.random.random() * self.seconds.get(kind, 0.05))
        self.code = self.strike()
        while told[-1][0] != "ended":
            told.append(self.lives.told())
        self.lives.life = None
        self.judge(told)

    def strike(self):
        """Send the signal, or Ctrl-C twice; returns the exit code that it should have."""
        if not self.signals:
            os.kill(self.pid, signal.SIGKILL)
            return -signal.SIGKILL
        number = self.signals[self.codes.total() % len(self.signals)]
        os.kill(self.pid, number)
        if number == signal.SIGINT and self.random.random() < 0.5:
            time.sleep(self.random.random())
            with suppress(ProcessLookupError):  # the first may have ended it
                os.kill(self.pid, number)
        return 128 + number

    def listen(self, before):
        """What a life tells next; how long it takes from the one to the other is an average."""
        told, now = self.lives.told(), time.monotonic()
        if before in self.seconds:
            self.seconds[before] += 0.2 * (now - self.last - self.seconds[before])
        self.last = now
        return told

    def judge(self, told):
        """It began where the ones before had come to, and no further than they could have."""
        assert told[-1] == ["ended", str(self.code)], (told, self.lives.printed()[-3000:])
        self.codes[self.code] += 1
        steps = {name: [int(words[0]) for key, *words in told if key == name] for name in NAMES}
        for step in steps["began"]:
            assert self.promised <= step <= self.promised + EVERY, (told, self.promised)
            self.promised = step
        self.promised = max([self.promised, *steps["saved"]])
        is_saving = len(steps["saving"]) > len(steps["saved"])
        self.fell["a save" if is_saving else "steps" if steps["began"] else "the start"] += 1


RUN = "often.py"
NAMES = ("began", "saving", "saved")


def arrays(folder):
    """Of the newest checkpoint, by path."""
    reader = find_readers(folder / "checkpoints")[-1]
    assert reader.problems() == []
    return reader.step, {path: reader.read(path) for path in reader.leaves}


def write_run(cheap, old="", new=""):
    """Of every other step that is saved the held-out loss is taken too."""
    source = (cheap / "tiny.py").read_text().replace("every_steps=2", f"every_steps={EVERY}")
    source = source.replace("heldout_fraction=0", "heldout_fraction=0.1")
    source = source.replace("evaluate_every=None", f"evaluate_every={2 * EVERY}")
    (cheap / RUN).write_text(source.replace(old, new))


def number_of(config, name, default):
    """How often to kill: as the environment says, 100 times with `--full`, else a default."""
    return int(os.environ.get(name, 100 if config.getoption("--full") else default))


def test_a_run_that_is_killed_at_random_moments_is_as_if_it_never_was(lives, cheap, pytestconfig):
    kills = number_of(pytestconfig, "KILLS", 4)
    print(f"seed {SEED}")  # noqa: T201
    write_run(cheap)
    lives.begin(run=RUN, changes={"run_dir": "filled", "steps": 2})
    assert lives.ended() == 0, lives.printed()
    killer = Killer(lives, random.Random(SEED), {"pid": 20, "began": 20, "saving": 40, "evaluating": 20})
    killer.lives_until(
        kills,
        lambda: (
            killer.fell["a save"] >= kills // 4
            and min(killer.fell["the start"], killer.fell["steps"]) >= kills // 20
            and killer.promised >= kills // 4
        ),
    )
    print(f"killed during {dict(killer.fell)}, at last after step {killer.promised}")  # noqa: T201
    judge_end(killer, lives, cheap)


MIXED = {
    "from shardtrain.data import Text": "from shardtrain.data import Corpus, Mixture\n"
    "from shardtrain.data.batches import Loading",
    "(self, tokens):\n        return self.table[tokens]": "(self, tokens, segments):\n"
    "        return self.table[tokens] * (1 + 0.1 * segments[..., None])",
    'Text(paths=(Path("text.txt"),), seq=8, heldout_fraction=0.1)': "Mixture(parts={name: Corpus("
    'paths=(Path(f"{name}.jsonl"),), seq=8, packing="separate", heldout_fraction=0.1)'
    ' for name in ("web", "code")}, weights="web 2 code 1", later="50: web 1 code 1")',
    "log_every=1,": 'log_every=1,\n        loading=Loading(workers=int(Path("workers").read_text())),',
}
"""What a run of packed documents in a mixture has in the place of what other lives here have."""


class OtherWorkers(Killer):
    """Each life has another number of worker processes than the one before."""

    def life(self):
        (self.lives.folder / "workers").write_text(str((2, 0, 1, 0)[self.codes.total() % 4]))
        super().life()


@pytest.mark.full
def test_kills_of_packed_documents_in_a_mixture_with_other_workers_each_time(lives, cheap):
    """No sample is lost or repeated, or parameters and losses would be others."""
    kills = int(os.environ.get("KILLS", "100"))
    write_run(cheap)
    source = (cheap / RUN).read_text()
    for old, new in MIXED.items():
        assert old in source
        source = source.replace(old, new)
    (cheap / RUN).write_text(source)
    for name in ("web", "code"):
        texts = [f"{name} {i} says {'more ' * (i % 5)}" for i in range(60)]
        (cheap / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    for name in ("run", "whole"):
        shutil.rmtree(cheap / name, ignore_errors=True)
    killer = OtherWorkers(
        lives, random.Random(SEED), {"pid": 10, "began": 20, "saving": 50, "evaluating": 20}
    )
    killer.lives_until(kills, lambda: killer.promised >= kills // 4)
    print(f"killed during {dict(killer.fell)}, at last after step {killer.promised}")  # noqa: T201
    (cheap / "workers").write_text("0")
    judge_end(killer, lives, cheap)


def test_signals_at_random_phases_end_as_documented(lives, cheap, pytestconfig):
    """Through the command line, the start included; each code is that of the signal, and no line is lost."""
    num_signals = number_of(pytestconfig, "SIGNALS", 4)
    write_run(cheap)
    for name in ("run", "whole"):
        shutil.rmtree(cheap / name, ignore_errors=True)
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    kinds = {"pid": 25, "began": 25, "saving": 25, "evaluating": 25}
    killer = Killer(lives, random.Random(SEED), kinds, asking, words=["train", RUN])
    killer.lives_until(num_signals, lambda: killer.promised >= num_signals // 4)
    print(f"ended with {dict(killer.codes)}, at last after step {killer.promised}")  # noqa: T201
    assert set(killer.codes) == {128 + number for number in asking}
    judge_end(killer, lives, cheap)


ORPHAN = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"(?:    .*\n|  File \"(?:<string>|.*/multiprocessing/spawn\.py)\".*\n)+"
    r"(?:EOFError|_pickle\.UnpicklingError): .*\n"
)
"""What Python prints in a worker process that was just being started when its parent was killed."""


def judge_end(killer, lives, cheap):
    """What all lives together left is what one left that nobody ended."""
    last = killer.promised + MORE
    lives.begin(run=RUN, changes={"steps": last})
    assert killer.promised <= int(lives.until("began")[0]) <= killer.promised + EVERY
    assert lives.ended() == 0, lives.printed()
    said = ORPHAN.sub("", lives.printed())
    assert "broken" not in said
    assert "Traceback" not in said
    assert "WARNING" not in said

    lives.begin(run=RUN, changes={"run_dir": "whole", "steps": last})
    assert lives.ended() == 0, lives.printed()
    step, killed = arrays(cheap / "run")
    assert step == last
    _, whole = arrays(cheap / "whole")
    assert killed.keys() == whole.keys()
    for path, array in whole.items():
        np.testing.assert_array_equal(killed[path], array, err_msg=path)
    assert [line["step"] for line in metrics_of(cheap / "run")] == list(range(1, last + 1))
    assert metrics_of(cheap / "run") == metrics_of(cheap / "whole")
    assert names(cheap / "run") == names(cheap / "whole")
    before = (last - 1) // EVERY * EVERY
    assert names(cheap / "run/checkpoints") == [f"step_{step:08d}" for step in (before, last)]


@pytest.mark.full
def test_killed_while_a_save_is_copied_from_a_fast_disk(lives, cheap):
    """The copy begins where the save ends; what it had come to is on the fast disk."""
    write_run(cheap, "keep=2", 'keep=2, fast=Path("fast")')
    shutil.rmtree(cheap / "run", ignore_errors=True)
    killer = Killer(lives, random.Random(SEED), {"saved": 1})
    for _ in range(3):
        killer.life()
    (fast,) = (cheap / "fast").iterdir()
    shared = cheap / "run/checkpoints"
    copied = find_readers(shared)[-1].step
    assert killer.promised <= find_readers(fast)[-1].step
    # another node has not that disk
    fast.rename(cheap / "lost")
    lives.begin(run=RUN, changes={"steps": copied + EVERY})
    assert int(lives.until("began")[0]) == copied
    assert lives.ended() == 0, lives.printed()
    assert names(shared) == [f"step_{step:08d}" for step in (copied, copied + EVERY)]
    assert "broken" not in lives.printed()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)
