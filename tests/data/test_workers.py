"""Worker processes: the same batches whatever their number, errors as without them, none left behind."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_language_model import TinyConfig
from worker_data import Failing, Unpicklable, Words

from shardtrain.data import Batches, Chat, ImageFiles, MaskedTokens, Mixture, Text, TokenBatches
from shardtrain.data.batches import Loading
from shardtrain.data.workers import Workers
from shardtrain.errors.user_code import UserCodeFailed, user_traceback
from shardtrain.trainer.config import Run
from shardtrain.trainer.sources import make_batches

HELPERS = Path(__file__).parents[1] / "helpers"


def loaded(batches, number, start=None):
    """The first batches without the numbers of processes, those numbers, and the position after each."""
    stream = batches.iterate(start)
    found = [next(stream) for _ in range(number)]
    stream.close()
    processes = {int(each) for batch, _ in found for each in batch.pop("process", [])}
    return found, processes


def test_workers_give_the_batches_of_one_process_and_end_with_them():
    options = {"source": Words(), "batch": 21, "seed": 3}
    here, own = loaded(TokenBatches(**options), 12)
    assert own == {os.getpid()}
    found, processes = loaded(TokenBatches(**options, workers=2), 12)
    assert len(processes) == 2, "both have loaded some"
    assert os.getpid() not in processes
    assert [position for _, position in found] == [position for _, position in here]
    for (batch, _), (expected, _) in zip(found, here, strict=True):
        assert batch.keys() == expected.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], expected[name])
    assert not multiprocessing.active_children()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_held_out_batches_have_workers_of_their_own():
    loading = Loading(workers=0, heldout_workers=1)
    run = Run(model=TinyConfig(), data=Text(seq=8), batch=21, batch_unit="tokens", loading=loading)
    heldout = make_batches(run, Words(), epochs=1, shuffle=False)
    number = heldout.num_batches()
    _, processes = loaded(heldout, number)
    assert len(processes) == 1
    assert os.getpid() not in processes
    assert loaded(make_batches(run, Words(), epochs=1), number)[1] == {os.getpid()}
    assert make_batches(replace(run, loading=Loading(workers=2)), Words(), shuffle=False).workers == 0


def test_every_source_is_copied_and_images_that_are_left_out_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 90)
    rows = [{"prompt": f"what is {i}?", "completion": f"{i}"} for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i in range(4):
        path = tmp_path / "images" / f"c{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 60 * i, np.uint8)).save(path)
    path.write_bytes(b"no image")
    images = ImageFiles(paths=(tmp_path / "images",), classes=2, size=4, heldout_fraction=0, on_error="skip")
    text = Text(paths=(tmp_path / "a.txt",), seq=8)
    for data in (
        text,
        MaskedTokens(data=text, mask_token=255),
        Chat(paths=(tmp_path / "chat.jsonl",), seq=99, template="chatml"),
        images,
    ):
        source = data.train(tmp_path / "run")
        assert len(source) > 0
        copy = pickle.loads(pickle.dumps(source))
        for name, value in copy[0].items():
            np.testing.assert_array_equal(value, source[0][name])
    mixture = Mixture(parts={"a": images}, weights="a 1").train(tmp_path / "run")
    assert mixture.num_skipped == 0
    loaded(Batches(source=mixture, batch=4, workers=1), 2)
    assert mixture.num_skipped == 1


def test_an_error_in_a_worker_is_the_one_of_the_run():
    with pytest.raises(UserCodeFailed, match=r"sample 5 of Failing raised LookupError: no word 5") as raised:
        loaded(Batches(source=Failing(), batch=1, shuffle=False, workers=1), 1, {"epoch": 0, "index": 5})
    assert "in augmented" in user_traceback(raised.value)
    with pytest.raises(ValueError, match="samples of one batch differ"):
        loaded(Batches(source=Words(), batch=2, shuffle=False, workers=1), 1)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_named():
    text = r"data worker 0, a process that loads batches, was ended by SIGKILL \(memory may have run out\)"
    with pytest.raises(ChildProcessError, match=text):
        loaded(Batches(source=Failing(), batch=1, shuffle=False, workers=1), 1, {"epoch": 0, "index": 3})
    assert not multiprocessing.active_children()


class SlowToSend:
    """A position that says when it is being sent, and later whether its pipe was closed meanwhile."""

    def __init__(self, workers):
        self.workers, self.begun, self.closed = workers, threading.Event(), []

    def __reduce__(self):
        self.begun.set()
        time.sleep(0.3)
        self.closed += [worker.pipe.closed for worker in self.workers._all]
        return (dict, ({"epoch": 0, "index": 0},))


def test_no_pipe_is_closed_while_a_thread_writes_to_it():
    """Its number could be that of another file, which would get the message."""
    with Workers(Batches(source=Words(), batch=1, seed=1), 1, Words()) as workers:
        position = SlowToSend(workers)
        thread = threading.Thread(target=workers.load, args=(position,))
        thread.start()
        assert position.begun.wait(60)
    thread.join()
    assert position.closed == [False]
    with pytest.raises(RuntimeError, match="were ended"):
        workers.load({"epoch": 0, "index": 0})


def test_what_cannot_be_copied_and_numbers_out_of_range_are_refused():
    text = r"the data \(Unpicklable\) cannot be copied to worker processes .* --loading.workers 0"
    with pytest.raises(ValueError, match=text):
        loaded(Batches(source=Unpicklable(), batch=2, workers=2), 1)
    with pytest.raises(ValueError, match=r"prefetch is -1; use 0 or more\n.*workers is -2; use 0 or more"):
        Loading(prefetch=-1, workers=-2)
    with pytest.raises(ValueError, match="workers is -1; use 0 or more"):
        Batches(source=Words(), batch=1, workers=-1)


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from worker_data import Words
from shardtrain.data import Batches
if __name__ == "__main__":
    stream = Batches(source=Words(), batch=1, workers=1, shuffle=False).iterate()
    processes = {int(next(stream)[0].pop("process")[0]) for _ in range(2)}
    print(*processes, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(900)
"""


@pytest.mark.parametrize("ending", ["kill", "exit"])
def test_no_worker_outlives_its_parent(ending, tmp_path):
    """Killed, or ended without closing anything."""
    (tmp_path / "parent.py").write_text(PARENT.replace("batch=1,", "batch=1, seed=1,"))
    command = [sys.executable, str(tmp_path / "parent.py"), str(HELPERS)]
    parent = subprocess.Popen(
        [*command, "wait" if ending == "kill" else ""], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent:
        processes = parent.stdout.readline().split()
        assert len(processes) == 1
        if ending == "kill":
            parent.kill()
    end = time.monotonic() + 300
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < end
        time.sleep(0.05)
