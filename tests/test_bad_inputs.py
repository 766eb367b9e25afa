"""What people type wrong: each gets a message that names the value and the cure, and no traceback.

A row is a command and what its message must have, in parts between bars; FILES are where it runs.
What only islands can meet is in tests/launch and tests/test_together.
"""

import shlex
import shutil

import pytest

from shardtrain import cli

# ruff: noqa: E501  (a row is a line)

FILES = {
    "tiny.txt": "the quick brown fox jumps over the lazy dog. " * 40,
    "tiny.py": """
from pathlib import Path
import shardtrain as st
from shardtrain.models.decoder import DecoderConfig

def run():
    model = DecoderConfig(vocab=256, seq=16, embed=16, num_layers=4, num_heads=8, num_kv_heads=8, mlp=32)
    data = st.Text(paths=(Path(__file__).with_name("tiny.txt"),), seq=16)
    return st.Run(model=model, data=data, batch=16, steps=1)
""",
    "empty.py": "",
    "empty.toml": "",
    "needs.py": "def run(x): return x\n",
    "dict.py": "def run(): return {'batch': 3}\n",
    "own_combiner.py": "mine = 3\n",
    "broken.toml": "mesh = [[",
    "unknown.toml": "mseh = 3\n",
    "number.toml": "mesh = 3\n",
    "text_rule.toml": "[parameters]\nembed = 'fsdp'\n",
    "axis_rule.toml": "[parameters]\nembed = ['fspd']\n",
    "twice_rule.toml": "[parameters]\nembed = ['fsdp', 'fsdp']\n",
    "zero.toml": "zero = 4\n",
    "columns.csv": "tick,stage\n1,2\n",
    "short.txt": "abc",
    "binary.txt": b"\xff\xfe" * 2000,
    "folder/.hidden": "",
    "json/config.json": "{",
    "list/config.json": "[1]",
    "mamba/config.json": '{"model_type": "mamba"}',
    "mamba/model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "no_weights/config.json": '{"model_type": "gpt2"}',
    "weights/config.json": '{"model_type": "gpt2"}',
    "weights/model.safetensors": "xx",
}

COMMANDS = {
    "trian": "unknown command 'trian' (did you mean 'train'?)",
    "train": "RUN is missing | train RUN",
    "train nope.py": "no run file nope.py | give a path.py[:name]",
    "train ./folder": "'./folder' is not the name of a module; give a path.py[:name] or module:name",
    "train no.module:run": "no module 'no.module' | path.py[:name] or module:name",
    "train empty.py": "empty.py has no 'run' | def run() -> Run",
    "train tiny.py:rum": "has no 'rum' (did you mean 'run'?)",
    "train needs.py": "a function with arguments | def run() -> Run",
    "train link.py": "no run file link.py: it is a link to link.py, which leads to no file",
    "train tiny.py –mesh data=2": "'–mesh' | is no hyphen; write --mesh",  # noqa: RUF001
    "inspect tiny.py —devices=8": "is no hyphen; write --devices=8",
    "train dict.py": "gave dict {'batch': 3} | must return a shardtrain.Run",
    "inspect tiny.py --mesh tensor=9999999999999999": "axis 'tensor' has size | allowed: at most 16777216",
    "inspect tiny.py --mesh data=1 --devices 1e10": "--devices | '1e10'",
    "inspect tiny.py --mesh data=1 --timeline x.doc": "x.doc | .svg or .png: use x.svg",
    "inspect tiny.py --mesh data=1 --compile v100": "'v100' (did you mean 'h100' or 'a100'?)",
    "checkpoint": "usage: shardtrain checkpoint COMMAND",
    "checkpoint list": "no command 'list' (did you mean 'ls'?)",
    "checkpoint ls nope": "no folder nope; give a run's folder",
    "checkpoint show folder": "folder contains no checkpoints; give a run's folder",
    "checkpoint show folder@-1": "has the step '-1'; write folder@NUMBER or folder@best",
    "checkpoint show nope@x": "no folder nope@x",
    "checkpoint diff folder": "Missing from shardtrain checkpoint diff | RUN",
    "checkpoint verify nope@3": "no folder nope",
    "checkpoint prune folder": "Missing from shardtrain checkpoint prune | --keep INT",
    "checkpoint export nope out": "no folder nope",
    "checkpoint import nope out": "no nope/config.json; give a folder with config.json and model.safetensors",
    "checkpoint import folder out": "no folder/config.json",
    "checkpoint import json out": "json/config.json is no JSON | line 1 column 2 | copy it again",
    "checkpoint import list out": "list/config.json is [1]; it is an object",
    "checkpoint import no_weights out": "no_weights has no model.safetensors; give a folder",
    "checkpoint import weights out": "weights/model.safetensors cannot be read | download or copy it again",
    "checkpoint import mamba out --using no.module": "no module 'no.module'; give one that has import_model",
    "checkpoint import mamba out --using ..x": "'..x' is not the name of a module; give one that has import_model",
    "checkpoint import mamba out --using shlex": "shlex has no import_model",
    "inspect tiny.py --mesh data=1 --microbatches -1 --pipeline-stages 0": "--microbatches is -1; use 1 to 8192 | --pipeline-stages is 0; use 1 to 1024",
    "launch --islands 2": "the command to launch is missing; it goes after --",
    "launch --islands 2 -- fly tiny.py": "not 'fly' (known: train, inspect",
    "launch --processes-per-island 0 -- train tiny.py": "'0' is no number from 1; write one for all islands",
    "launch --islands 2 --restarts -1 -- train tiny.py": "restarts is -1; use 0 or more",
    "launch mpi --hosts '' --islands 2 --dry-run -- train tiny.py": "'' is no host; write a name",
    "launch slurm --islands 2 --time x --dry-run -- train tiny.py": "time 'x' | hours:minutes:seconds, 01:30:00",
    "launch slurm --islands 2 --nodes 5 --time 1:0:0 --dry-run -- train tiny.py": "2 % 5 = 2. Use 2 or 1 nodes",
    "launch slurm --islands 2 --partition 'a\n#SBATCH --x' --dry-run -- train tiny.py": "partition 'a\\n#SBATCH --x' may have letters, digits",
    "launch slurm --islands 2 --account 'a b' --dry-run -- train tiny.py": "account | 'a b'",
    "doctor --only nothing": "no check 'nothing' (known: names, ports",
    "doctor --patience nan": "nan",
}

OPTIONS = {
    "--batch -4 --steps 0 --seed 4294967296 --log-every 0 --evaluate-every 0 --evaluate-batches 0": "batch is -4; use 1 or more | steps is 0; use 1 or more | seed is 4294967296; use a number from 0 to 2**32 - 1 | log_every is 0; use 1 or more | evaluate_every is 0; use 1 or more | evaluate_batches is 0; use 1 or more",
    "--batch abc": "--batch | 'abc'",
    "--seed -1": "seed is -1; use a number from 0 to 2**32 - 1",
    "--mesh data=-2": "axis 'data' has size -2; allowed: a whole number from 1, or -1 (the rest)",
    "--data.heldout-fraction 2": "heldout_fraction is 2.0; use 0 (nothing held out) or more, below 1",
    "--combine top_k:x+mean": "top_k | 'x'",
    "--nonfinite ignore": "'ignore' | 'skip', 'stop', 'roll_back'",
    "--optimizer.name adamw2": "'adamw2' | 'adamw', 'sgd'",
    "--optimizer.learning-rate.peak inf --optimizer.learning-rate.warmup -5": "peak is inf; give a number, finite | warmup is -5 steps; it must be 0 or more",
    "--optimizer.clip nan --optimizer.weight-decay -0.1": "clip is nan; give a number or None, finite | weight_decay is -0.1; it must be a number, 0 or more",
    "--checkpoints.every-steps 0 --checkpoints.keep 0 --checkpoints.every-minutes nan": "every_steps is 0; use 1 or more | keep is 0; use 1 or more | every_minutes is nan; give a number or None, finite",
    "--recovery.spike -1": "spike is -1.0; use a number above 0, such as 8, or None",
    "--recovery.rollbacks 3": "--recovery.rollbacks: set recovery.rollbacks in the run file",
    "--data.seq 0 --data.heldout-fraction nan": "seq is 0; use 1 or more | heldout_fraction is nan",
    "--btach 3": "--btach | Perhaps you meant: --batch",
    "--batch 1.5": "--batch | '1.5' | --batch INT",
    "--batch 32 --accumulate 5": "batch 32 | 5 microbatches: 32 % 40 = 32. Use 40",
    "--batch 12 --mesh data=8": "batch 12 | 12 % 8 = 4. Use 8 or 16",
    "--mesh data=2 tensor=2": "'data=2' and 'tensor=2' as two words; join axes by commas: --mesh data=2,tensor=2",
    "--mesh=data=2, tensor=2": "join axes by commas: --mesh data=2,tensor=2",
    "--mesh empty.toml": "empty.toml is empty; a layout file has a table [mesh]",
    "--mesh data=x": "'data=x' is not AXIS=NUMBER, as in data=2",
    "--mesh data=2,data=4": "'data' is given twice: 2 and 4; give it once",
    "--mesh data=-1,fsdp=-1": "['data', 'fsdp'] are all -1; at most one can be the rest",
    "--mesh data=16": "needs 16 devices, and there are 8 | divisors: 1, 2, 4, 8",
    "--mesh nope.toml": "no layout file nope.toml",
    "--mesh broken.toml": "broken.toml is not a layout in TOML",
    "--mesh unknown.toml": "unknown key 'mseh' (did you mean 'mesh'?)",
    "--mesh number.toml": "mesh is 3; give a dict",
    "--mesh text_rule.toml": "parameters.embed is 'fsdp'; write a list of axes, embed = ['fsdp']",
    "--mesh axis_rule.toml": "parameters.embed: axis 'fspd' (did you mean 'fsdp'?)",
    "--mesh twice_rule.toml": "parameters.embed: axis 'fsdp' occurs 2 times",
    "--zero 0": "zero is 0; allowed: 1, 2 or 3",
    "--model.embed 0": "embed is 0; it must be at least 1. Use embed=1 or more",
    "--model.embed 50 --model.num-heads 4 --model.num-kv-heads 4": "50 % 4 = 2. Use embed=48 or embed=52",
    "--model.num-kv-heads 3": "num_heads 8 | num_kv_heads 3: 8 % 3 = 2. Use num_heads=6 or num_heads=9",
    "--model.eps 0 --model.remat full": "--model.eps: set model.eps in the run file | --model.remat: use --remat,",
    "--model.vocab 100": "the model has classes 0 to 99: give the model 123 classes or more",
    "--model.seq 8": "tokens of length 16 | seq=8",
    "--combine adasumm": "combiner 'adasumm' (did you mean 'adasum'",
    "--combine int8+int8+mean": "codec 'int8' is given twice | write it once",
    "--combine power_sgd:0+mean": "power_sgd rank is 0; it must be a whole number above 0",
    "--combine nope.py:x": "nope.py",
    "--combine own_combiner.py:x": "no combiner by the name 'x' (known: mine) | shardtrain.combine.Combiner",
    "--combine-on weights": "'weights' | 'gradients', 'deltas'",
    "--inside max": "'max' | 'mean', 'sum'",
    "--across tensor": "'tensor' | 'data', 'pipeline'",
    "--across pipeline --partitions 0": "partitions is 0; use 1 or more",
    "--reduce ring": "'ring' | 'all_reduce', 'root', 'hierarchical'",
    "--optimizer.clip -1": "clip is -1.0; it must be above 0, or None",
    "--local-steps 0": "every (--local-steps) is 0; use 1 or more",
    "--inside sum": "inside is 'sum', but there is one island | use mean",
    "--across pipeline --partitions 2": "partitions is 2, and there are 1 islands | use --partitions 1",
    "--shares 3,1": "shares",
    "--shares a,b": "'a' is not a number from 0, as in 3,1",
    "--bucket-bytes -1": "bucket_bytes is -1",
    "--schedule 1f2b": "schedule '1f2b' (did you mean '1f1b'?)",
    "--schedule nope.csv --mesh pipeline=2,data=4": "nope.csv",
    "--virtual-stages 0": "virtual_stages is 0; use 1 or more",
    "--stages 3,3 --mesh pipeline=2,data=4": "3,3 adds up to 6 | all have 4, as 2,2",
    "--stages 1,1,2 --mesh pipeline=2,data=4": "1,1,2 is 3 numbers; give 2, as 2,2",
    "--stages memory": "stages 'memory' (known: equal, params, flops, time)",
    "--start-from.checkpoint nope": "nope does not exist; give the folder of a run, of its checkpoints or of a step, or a folder of Hugging Face",
    "--start-from.checkpoint folder": "folder holds no complete checkpoint: it has no finished one; give the folder of a run",
    "--start-from.step 3": "step is 3 of no checkpoint; give the checkpoint too",
    "--watch.silence-seconds nan": "silence_seconds is nan; give a number, finite",
    "--data nope/": "nope is not there, or empty; give a text file or a folder of them",
    "--data short.txt": "has 4 tokens; 2 windows of seq 16 need 2 * (16 + 1) = 34. Give more, or use seq 1",
    "--data binary.txt": "binary.txt (it is in UTF-16, | iconv -f UTF-16 -t UTF-8); give text files",
    "--run-dir tiny.txt": "run_dir tiny.txt is a file; give a folder",
    "--time-limit abc": "time 'abc': write hours:minutes:seconds, 01:30:00",
    "--cpu-devices 0": "--cpu-devices 8 | got '0'",
    "--cpu-devices 2,1": "is for 2 islands, and there are 1",
}
"""Options behind `train tiny.py`."""

ROWS = {**COMMANDS, **{f"train tiny.py {words}": expected for words, expected in OPTIONS.items()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_inputs")
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "link.py").symlink_to("link.py")
    return folder


def left(folder):
    """What is in the folder, beside what Python and a run that was begun leave there."""
    return {path for path in folder.rglob("*") if not {"runs", "__pycache__"} & set(path.parts)}


@pytest.mark.parametrize("words", ROWS)
def test_a_bad_input_is_refused_with_its_cure(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "1000")
    before = left(folder)
    try:
        code = cli.main(shlex.split(words))
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    text = " ".join((printed.err or printed.out).split())
    assert code == 2, text
    assert "Traceback" not in text
    for expected in ROWS[words].split(" | "):
        assert expected in text
    assert left(folder) == before
    shutil.rmtree(folder / "runs", ignore_errors=True)
