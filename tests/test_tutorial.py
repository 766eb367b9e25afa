"""docs/tutorial.md: its files and commands, run as they stand there, in their order."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from shardtrain.report.sinks.json_lines import read_jsonl

PAGE = (Path(__file__).parents[1] / "docs/tutorial.md").read_text()
PARTS = re.compile(
    r"(?:Write|write) `(?P<file>\w+\.py)`:\n\n```python\n(?P<text>.*?)```"
    r"|^    shardtrain (?P<command>[^\n]*)$"
    r"|^```python\n(?P<program>.*?)```",
    re.DOTALL | re.MULTILINE,
)
REFUSED = "inspect my_model.py --mesh tensor=3"


def test_a_reader_of_the_tutorial_can_do_all_of_it(tmp_path, warm_python, warm_shardtrain):
    said = {}
    # a reader's machine has one device, as the page shows, if a command asks for no others
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    environment = {**os.environ, "XLA_FLAGS": flags}
    for part in PARTS.finditer(PAGE):
        if part["file"]:
            (tmp_path / part["file"]).write_text(part["text"])
            continue
        if part["program"]:
            (tmp_path / "program.py").write_text(part["program"])
        words = [*warm_python, "program.py"]
        if part["command"]:
            words = [*warm_shardtrain, *shlex.split(part["command"])]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        name = part["command"] or "program.py"
        assert done.returncode == (2 if name == REFUSED else 0), f"{name}\n{done.stdout}{done.stderr}"
        said[name] = done.stdout + done.stderr
    assert len(said) == 17
    assert not [name for name, text in said.items() if "WARNING" in text]
    # the law, and a run that changed its mesh
    one, four = (read_jsonl(tmp_path / "runs" / name / "metrics.jsonl") for name in ("one", "four"))
    assert abs(one[-1]["train/loss"] / four[len(one) - 1]["train/loss"] - 1) < 1e-4
    assert (one[-1]["step"], four[-1]["step"]) == (40, 60)
    assert read_jsonl(tmp_path / "runs/my_data/metrics.jsonl")[-1]["heldout/loss"] < 3.5
    # what the page shows of them
    assert "mesh: 1 device" in said["train first.py"]
    assert "64 % 3 = 1" in said[REFUSED]
    assert "(1, 8, 256)" in said["program.py"]
    assert (tmp_path / "strategy.toml").is_file()
