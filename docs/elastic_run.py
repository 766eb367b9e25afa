"""Draw the islands of a run over time, above its loss: docs/pictures/elastic_run.svg.

    uv run --extra elastic python docs/elastic_run.py       # about two minutes on two cores

Three islands of a small `examples/gpt_text.py`: the chief is killed, another one joins, and one leaves.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shardtrain.elastic.history import read_history
from shardtrain.report.elastic_run import summarize
from shardtrain.report.plots.members import plot_members
from shardtrain.report.sinks.json_lines import read_jsonl

SIZE = (
    "examples/gpt_text.py --elastic 1..3 --cpu-devices 1 --steps 6000 --batch 12 --log-every 20"
    " --sinks jsonl --evaluate-every None --model.embed 64 --model.mlp 128 --model.num-layers 2"
    " --model.num-heads 2"
)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def main() -> None:
    with TemporaryDirectory() as folder:
        run, islands = Path(folder, "run"), list[subprocess.Popen[bytes]]()

        def start() -> None:
            words = [sys.executable, "-m", "shardtrain", "train", *SIZE.split(), "--run-dir", str(run)]
            environment = {**os.environ, "SHARDTRAIN_ADDRESS": "127.0.0.1"}
            none = subprocess.DEVNULL
            islands.append(subprocess.Popen(words, env=environment, stdout=none, stderr=none))

        def find_names() -> tuple[str, ...]:
            has_begun = (run / "elastic/epochs/1.json").exists()
            return read_history(run).epochs[-1].names if has_begun else ()

        def send(name: str, number: int) -> None:
            os.kill(int(name.split("-")[-2]), number)

        start()
        wait_for(lambda: len(find_names()) == 1)
        for _ in range(2):
            start()
        wait_for(lambda: len(find_names()) == 3)
        time.sleep(15)
        send(find_names()[0], signal.SIGKILL)
        time.sleep(10)
        start()
        wait_for(lambda: len(find_names()) == 3)
        time.sleep(10)
        send(find_names()[0], signal.SIGTERM)
        time.sleep(10)
        for name in find_names():
            send(name, signal.SIGTERM)
        for each in islands:
            each.wait()
        lines = read_jsonl(run / "metrics.jsonl")
        past = summarize(read_history(run), lines, time.time())
    names = [replace(each, name=f"island {number}") for number, each in enumerate(past.islands, 1)]
    title = f"{past.num_steps:,} steps: one island is killed, one joins, one leaves"
    path = Path(__file__).parent / "pictures/elastic_run.svg"
    plot_members(replace(past, islands=names), lines, path, title=title)


main()
