"""Runs that cost little to begin: a program imports everything once, and forks a life for each line it reads.

A life tells through a pipe where it is, and may be killed at any moment. `Lives` is the program for a test.
"""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TOLD_SECONDS = 300.0
LIFE_SECONDS = 900.0


def main(pipe):
    import gc
    import importlib

    def tell(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    # no more than imports: a backend of jax would not survive the fork
    for name in ("shardtrain.trainer.train", "shardtrain.cli.train", "shardtrain.islands.membership"):
        importlib.import_module(name)
    importlib.import_module("tensorboardX")
    gc.collect()
    gc.freeze()
    tell("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if not (pid := os.fork()):
            live(request, tell)
        tell("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def live(request, tell):
    """A life: `shardtrain` with its words; or, which is cheaper to begin, `train` with changes to a run."""
    import dataclasses
    import traceback

    from shardtrain import cli
    from shardtrain.cli.run_file import load_run
    from shardtrain.system.stop_signals import STOPPING
    from shardtrain.trainer.train import train

    if "words" in request:
        # signals wait until the command line listens for them, as it does from its first line on
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        run: Any = cli._run
        cli._run = lambda *arguments: (signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING), run(*arguments))[
            1
        ]
    tell("pid", os.getpid())
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    code = 70
    try:
        tells(tell)
        if "words" in request:
            code = cli.main(request["words"])
        else:
            train(dataclasses.replace(load_run(request["run"]), **request["changes"]))
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tells(tell):
    """Where a run begins, when it evaluates, and when a save begins and is finished."""
    import shardtrain.checkpoints.checkpointer
    import shardtrain.checkpoints.save
    from shardtrain.trainer import session, train

    trainer: Any = train
    setup: Any = session
    checkpoints: Any = shardtrain.checkpoints.checkpointer.Checkpoints
    saver: Any = shardtrain.checkpoints.save.Saver
    find_start_point, save, finish = trainer.find_start_point, checkpoints.save, saver._finish
    make_evaluation = setup.make_evaluation

    def telling_start(*arguments):
        start = find_start_point(*arguments)
        tell("began", start.step)
        return start

    def telling_evaluation(*arguments):
        evaluate = make_evaluation(*arguments)

        def evaluated(state):
            tell("evaluating")
            return evaluate(state)

        return evaluated

    def telling_save(self, step, *arguments):
        self.wait()
        tell("saving", step)
        save(self, step, *arguments)

    def telling_finish(self, step, *arguments):
        notes = finish(self, step, *arguments)
        tell("saved", step)
        return notes

    setup.make_evaluation = telling_evaluation
    trainer.find_start_point = telling_start
    checkpoints.save, saver._finish = telling_save, telling_finish


class Lives:
    """The program while this is entered.

    Args:
      folder: where it runs; what its lives print goes to files there, one each: a process that a killed life
        left may still write while the next one does.
      before: words that start it, such as those of unshare.
    """

    def __init__(self, folder, *before):
        self.folder, self._before, self.outputs = folder, before, []
        self._told, self.life, self._number = queue.Queue(), None, itertools.count()

    def __enter__(self):
        read, write = os.pipe()
        flags = [word for word in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in word]
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._process = subprocess.Popen(
            [*self._before, sys.executable, __file__, str(write)],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=(write,),
            cwd=self.folder,
            env={**os.environ, **compiled, "XLA_FLAGS": " ".join(flags)},
        )
        os.close(write)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()
        assert self.told(seconds=900) == ["ready"]
        return self

    def __exit__(self, *exception):
        self.end()
        self._process.kill()
        self._process.communicate(timeout=300)

    @property
    def pid(self):
        """Of the program, whose mounts its lives see."""
        return self._process.pid

    def shell(self, command):
        """Run a command where the program is, among its mounts, which it was started with unshare for."""
        enter = ["nsenter", "-t", str(self.pid), "-U", "-m", "--preserve-credentials"]
        subprocess.run([*enter, "sh", "-c", f"cd {self.folder} && {command}"], check=True)

    def begin(self, **request):
        """Begin a life: `words=`, or `run=` and `changes=`; returns its process."""
        assert self._process.stdin is not None
        self.outputs.append(self.folder / f"output.{next(self._number)}")
        self._process.stdin.write(json.dumps({"output": str(self.outputs[-1]), **request}) + "\n")
        self._process.stdin.flush()
        self.life = int(self.until("pid")[0])
        return self.life

    def run(self, *words):
        """A life to its end; its exit code, and what it printed."""
        self.begin(words=[str(word) for word in words])
        return self.ended(), self.outputs[-1].read_text()

    def ended(self):
        """The exit code of a life, once it has ended by itself."""
        deadline = time.monotonic() + LIFE_SECONDS
        while (told := self.told(deadline - time.monotonic()))[0] != "ended":
            pass
        self.life = None
        return int(told[1])

    def end(self):
        """Kill a life that goes on, as after a test that failed."""
        if self.life is not None:
            os.kill(self.life, signal.SIGKILL)
            self.ended()

    def printed(self):
        """What the lives of this test printed."""
        return "".join(output.read_text() for output in self.outputs if output.exists())

    def told(self, seconds=TOLD_SECONDS):
        """The next words that a life, or the program, tells.

        Raises:
          queue.Empty: nothing for so long.
        """
        return self._told.get(timeout=max(seconds, 0.001))

    def until(self, *names):
        """What follows the next of these names."""
        deadline = time.monotonic() + TOLD_SECONDS
        while True:
            name, *words = self.told(deadline - time.monotonic())
            if name == "ended":
                self.life = None
            if name in names:
                return words
            assert name != "ended", f"it ended by itself, {words}:\n{self.printed()[-5000:]}"

    def _read(self, pipe):
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._told.put(line.split())


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main(int(sys.argv[1]))
