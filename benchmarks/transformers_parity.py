"""That transformers loads what we export, and that what it saved trains on: tiny GPT-2, Llama and BERT.

uv run --with torch --with transformers benchmarks/transformers_parity.py

or, with torch in an environment of its own, --python THAT/bin/python. Every model is random, so nothing is
downloaded. Exit code 1 where a logit is off by more than 1e-4, a key is missing or extra, or a loss rises.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("gpt2", "llama", "bert")
SHARD_BYTES = {"gpt2": 5_000_000_000, "llama": 20_000, "bert": 20_000}
VOCAB, SEQ, ROWS, STEPS, MASK_TOKEN = 64, 32, 8, 20, 63
ATOL = 1e-4


def save_random(folder: Path) -> None:
    """(in the environment of torch) Save a model of each family as users of transformers do."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
    shape |= {"vocab_size": VOCAB, "max_position_embeddings": SEQ}
    gpt2 = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 3, "n_head": 4}
    models = {
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, num_key_value_heads=2, rope_theta=700.0)
        ),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**shape)),
    }
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(folder / name)


def load(folder: Path, batch: Path, out: Path) -> None:
    """(in the environment of torch) Load a folder as it is; write logits, loss and what did not fit."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    with np.load(batch) as given, torch.no_grad():
        logits = model.eval()(torch.from_numpy(given["tokens"]).long()).logits
        targets, chosen = torch.from_numpy(given["targets"]).long(), torch.from_numpy(given["chosen"]) > 0
        loss = torch.nn.functional.cross_entropy(logits[chosen], targets[chosen])
    wrong = [f"{what} {name}" for what in ("missing_keys", "unexpected_keys") for name in info[what]]
    wrong += [f"mismatched {name}" for name in info.get("mismatched_keys", [])]
    np.savez(out, logits=logits.numpy(), loss=loss.numpy(), wrong=wrong, dtype=str(model.dtype))


def compare(folder: Path, python: str) -> bool:
    """Import, train on, export and load each family; print what was found."""
    subprocess.run([python, __file__, "--save-random", folder / "theirs"], check=True)
    print(f"{'family':8}{'first loss':>12}{'torch':>12}{'last loss':>12}{'logits apart':>14}  files")
    good = [_compare_family(family, folder, python) for family in FAMILIES]
    return all(good)


def _compare_family(family: str, folder: Path, python: str) -> bool:
    theirs, ours, back = (folder / name / family for name in ("theirs", "imported", "exported"))
    run, batch = _import(family, theirs, ours, folder)
    losses = _train(run)
    words = ["export", str(run.run_dir), str(back), "--max-shard-bytes", str(SHARD_BYTES[family])]
    _checkpoint(*words)
    before, after = (_in_torch(each, batch, python) for each in (theirs, back))
    with np.load(batch) as given:
        apart = float(np.abs(_our_logits(run, given["tokens"]) - after["logits"]).max())
    files = len(list(back.glob("*.safetensors")))
    torch_loss, wrong = float(before["loss"]), list(after["wrong"])
    print(f"{family:8}{losses[0]:12.6f}{torch_loss:12.6f}{losses[-1]:12.6f}{apart:14.2e}  {files}", *wrong)
    return abs(losses[0] - torch_loss) < ATOL and losses[-1] < losses[0] and apart < ATOL and not wrong


def _import(family: str, theirs: Path, ours: Path, folder: Path) -> tuple[Any, Path]:
    """The run that the import wrote, on so few windows that every batch is all of them; and that batch."""
    from shardtrain import Optimizer, Schedule, Strategy
    from shardtrain.cli.run_file import load_run
    from shardtrain.data import write_tokens

    _checkpoint("import", str(theirs), str(ours))
    path = folder / "tokens.npy"
    write_tokens(path, [np.random.default_rng(0).integers(0, VOCAB - 1, ROWS * SEQ + 1)])
    run = load_run(str(ours / "run.py"))
    small = {"path": path, "vocab": VOCAB, "seq": SEQ, "heldout_fraction": 0.0}
    inner = run.data.data if family == "bert" else run.data
    data = dataclasses.replace(inner, **small)
    if family == "bert":
        data = dataclasses.replace(run.data, data=data, mask_token=MASK_TOKEN)
    source = data.train(folder)
    rows = [source[i] for i in range(len(source))]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    if family != "bert":
        tokens = batch["tokens"]
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "chosen": np.ones((ROWS, SEQ), np.int8)}
    np.savez(folder / "batch.npz", allow_pickle=False, **batch)
    changes = {"batch": ROWS, "steps": STEPS, "log_every": 1, "run_dir": folder / "runs" / family}
    optimizer = Optimizer(learning_rate=Schedule(name="constant", peak=1e-3))
    run = dataclasses.replace(run, data=data, optimizer=optimizer, strategy=Strategy(), **changes)
    return run, folder / "batch.npz"


def _checkpoint(*words: str) -> None:
    """The command, silently."""
    from shardtrain import cli

    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["checkpoint", *words])
    if code:
        raise SystemExit(code)


def _train(run: Any) -> list[float]:
    from rich.console import Console

    from shardtrain import train
    from shardtrain.report.sinks.json_lines import read_jsonl

    train(run, Console(file=io.StringIO()))
    return [row["train/loss"] for row in read_jsonl(run.run_dir / "metrics.jsonl")]


def _our_logits(run: Any, tokens: np.ndarray) -> np.ndarray:
    """Of the parameters in the run's newest checkpoint."""
    import jax
    from flax import nnx

    from shardtrain.cli.checkpoint_path import find_checkpoint_path

    reader = find_checkpoint_path(str(run.run_dir)).reader()
    module = run.model(nnx.Rngs(0))
    graph, state = nnx.split(module, nnx.Param)
    flat = [
        (path, leaf.replace(reader.read("/".join(["params", *map(str, path)]))))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return np.asarray(jax.jit(nnx.merge(graph, nnx.from_flat_state(flat)))(tokens))


def _in_torch(folder: Path, batch: Path, python: str) -> dict[str, np.ndarray]:
    out = folder.with_suffix(".npz")
    subprocess.run([python, __file__, "--load", folder, batch, out], check=True)
    with np.load(out) as found:
        return {name: found[name] for name in found.files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="that has torch and transformers")
    parser.add_argument("--save-random", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.save_random:
        save_random(options.save_random)
    elif options.load:
        load(*options.load)
    else:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if compare(Path(folder), options.python) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
