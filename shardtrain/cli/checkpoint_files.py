"""`shardtrain checkpoint export` and `import`: convert checkpoints to and from other programs' files.

A converter is a module that is imported by its name, as a user's own model is: shardtrain itself does not
know its models. Any module with `export_model` and `import_model` like the default's can be one.
"""

import importlib
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardtrain.checkpoints.evaluated_params import exported_params
from shardtrain.cli.checkpoint_path import CHECKPOINTS, find_checkpoint_path
from shardtrain.errors.messages import problems_error
from shardtrain.imported import MODEL_FILE, write_about
from shardtrain.report.quantities import bytes_text
from shardtrain.system import terminal
from shardtrain.system.atomic_write import new_folder, refuse_filled
from shardtrain.system.untrusted_files import read_bytes, read_json, read_text, whole_number

CONVERTER = "shardtrain.models.huggingface_files"
PARAMS = "params/"
MODEL = "model."
RUN_FILE, TOKENIZER = "run.py", "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the parameters of a step as a folder that Hugging Face's `transformers` loads unchanged.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step; RUN@20 is step 20 of it.
      out: the folder to write.
      step: the number of the step; None: the newest.
      dtype: dtype of the written weights: float32, bfloat16 or float16.
      max_shard_bytes: largest size of a file of weights; larger models are split over several files.
      tokenizer: a folder with tokenizer files to copy; None: tokenizer/ in the run's folder.
      run_file: the run file that trained the model; needed only if the checkpoint lacks the model's options.
      adapters: write the low-rank adapters alone, as the PEFT library loads them; without it they are merged
        into the weights.
      using: name of the Python module that converts the files.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    step: int | None = None
    dtype: str = "float32"
    max_shard_bytes: int = 5_000_000_000
    tokenizer: Path | None = None
    run_file: Annotated[str | None, tyro.conf.arg(name="run-file")] = None
    adapters: bool = False
    using: str = CONVERTER


@dataclass(frozen=True, kw_only=True)
class Import:
    """Convert a Hugging Face model folder (GPT-2, Llama, BERT) to a checkpoint to start from.

    Args:
      folder: a folder with config.json, model.safetensors (or several and their index), and tokenizer files.
      out: the folder to write: a checkpoint, a run file that trains it further, and the tokenizer.
      using: name of the Python module that converts the files.
    """

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    using: str = CONVERTER


def export_checkpoint(options: Export) -> int:
    """Export a checkpoint and return 0.

    Raises:
      ValueError: the step is broken, or of a model that the converter does not know.
    """
    place = find_checkpoint_path(options.run, options.step)
    reader = place.reader()
    if problems := reader.problems():
        raise problems_error(f"step {reader.step} is broken and is not exported", problems)
    model = _model_options(reader.extra, options.run_file)
    leaves = {
        path.removeprefix(PARAMS): leaf for path, leaf in reader.leaves.items() if path.startswith(PARAMS)
    }
    kept = place.folder.parent / TOKENIZER
    files = _converter(options.using, "export_model")(
        options.out,
        model,
        {path: tuple(leaf.shape) for path, leaf in leaves.items()},
        exported_params(reader.extra.get("run", {}).get("evaluate_with"), reader.leaves, reader.read),
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        tokenizer=options.tokenizer or (kept if kept.is_dir() else None),
        **({"adapters": True} if options.adapters else {}),
    )
    terminal.out(f"step {reader.step} -> {options.out}\n")
    for name in files:
        terminal.out(f"  {name}  {bytes_text((options.out / name).stat().st_size)}\n")
    return 0


def import_checkpoint(options: Import) -> int:
    """Import a folder as a checkpoint and return 0.

    Raises:
      FileExistsError: the folder to write holds something.
      ValueError: the folder cannot be read by the converter.
    """
    refuse_filled(options.out)
    # read the folder: configuration and tokenizer at once, arrays when their turn comes
    found = _converter(options.using, "import_model")(options.folder)
    config = found.config
    token = mask_token(found.tokenizer, config.vocab) if has_masks(config) else None
    extra = {
        "imported": {"family": found.family, "name": options.folder.resolve().name},
        "run": {MODEL + name: value for name, value in asdict(config).items()},
    }
    # write model, run file, checkpoint and tokenizer; the folder gets its name when all is there
    with new_folder(options.out) as filled:
        write_about(filled / MODEL_FILE, config, token)
        (filled / RUN_FILE).write_text(run_file_text(type(config), has_masks(config)))
        num_params = _save(filled / CHECKPOINTS, found.arrays, extra)
        for path in found.tokenizer:
            (filled / TOKENIZER).mkdir(exist_ok=True)
            (filled / TOKENIZER / path.name).write_bytes(read_bytes(path))
    # print what is missing, what was left out, and how to train on
    if has_masks(config) and token is None:
        terminal.out(
            f'the number of [MASK] was not found: write it as "mask_token" into {options.out / MODEL_FILE}\n'
        )
    for name in found.left_out:
        terminal.out(f"skipped, as the model has no such array: {name}\n")
    words = shlex.join(["--start-from.checkpoint", str(options.out), *option_words(found.config)])
    terminal.out(
        f"{found.family}: {num_params:,} parameters -> {options.out}\n"
        f"in a run file of your own: model={model_text(found.config)}\n"
        f"or with the options of such a run file: {words}\n"
        f"train on: {shlex.join(['shardtrain', 'train', str(options.out / RUN_FILE)])}"
        " (its first lines say with what data)\n"
    )
    return 0


def changed_options(config: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that are not at their defaults."""
    values = [(f.name, getattr(config, f.name), f.default) for f in fields(config)]
    return [(name, value) for name, value, default in values if value != default]


def option_words(config: Any) -> list[str]:
    """Return the command line options that give a run's model this configuration: all of them.

    >>> from shardtrain.models.mlp import MlpConfig
    >>> option_words(MlpConfig(features=4, mlp=8, num_layers=1, classes=3, dtype="bfloat16"))[-2:]
    ['--model.dtype', 'bfloat16']
    """
    words = []
    for name, value in asdict(config).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--model.{option}" if value else f"--model.no-{option}")
        else:
            words += [f"--model.{option}", str(value)]
    return words


def model_text(config: Any) -> str:
    """Return a configuration as Python: `DecoderConfig(vocab=256, ...)`."""
    inside = ", ".join(f"{name}={value!r}" for name, value in changed_options(config))
    return f"{type(config).__name__}({inside})"


def has_masks(config: Any) -> bool:
    """Whether the attention of a model is bidirectional, so that it trains on masked tokens."""
    return hasattr(config, "segments")


def run_file_text(kind: type, masked: bool) -> str:
    """Return the text of a run file that trains the import further, without any text of the download.

    Args:
      kind: the class of the model's configuration.
      masked: whether it trains by masked tokens.

    Raises:
      ValueError: the class cannot be imported by its name.
    """
    if not all(part.isidentifier() for part in (*kind.__module__.split("."), kind.__qualname__)):
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name")
    data = 'Tokens(path=Path("tokens.npy"), vocab=model.vocab, seq=min(model.seq, 1024))'
    loss, path, names = "", "--data.path", ["Optimizer", "Run", "Schedule", "StartFrom", "Tokens"]
    readers = ["read_model"]
    if masked:
        token = f'read_mask_token(FOLDER / "{MODEL_FILE}", model.vocab)'
        lines = ("MaskedTokens(", f"    data={data},", f"    mask_token={token},", ")")
        data, loss = "\n        ".join(lines), "        loss=masked_token_loss,\n"
        names, path = [*names, "MaskedTokens", "masked_token_loss"], "--data.data.path"
        readers = ["read_mask_token", "read_model"]
    names.sort(key=lambda name: (not name[0].isupper(), name))
    return f'''"""Trains the imported checkpoint in this folder further; {MODEL_FILE} describes its model.

Its tokens are those of its tokenizer: write them with `shardtrain.data.write_tokens`, then

shardtrain train {RUN_FILE} {path} my_tokens.npy
"""

from pathlib import Path

from shardtrain import {", ".join(names)}
from shardtrain.imported import {", ".join(readers)}
from {kind.__module__} import {kind.__qualname__}

FOLDER = Path(__file__).resolve().parent


def run() -> Run:
    model = read_model(FOLDER / "{MODEL_FILE}", {kind.__qualname__})
    return Run(
        model=model,
        data={data},
{loss}        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-5, warmup=100)),
        start_from=StartFrom(checkpoint=FOLDER),
        run_dir=Path("runs") / FOLDER.name,
    )
'''


def mask_token(tokenizer: list[Path], vocab: int) -> int | None:
    """The number of [MASK] in tokenizer files; None if it is not found.

    Raises:
      ValueError: a file is not of its form, or the number is not below `vocab`.
    """
    by_name = {path.name: path for path in tokenizer}
    if path := by_name.get("tokenizer.json"):
        content = read_json(path)
        added = content.get("added_tokens") if isinstance(content, dict) else None
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and token.get("content") == "[MASK]":
                return whole_number(token.get("id"), f"the id of [MASK] in {path}", vocab - 1)
    if path := by_name.get("vocab.txt"):
        lines = read_text(path).splitlines()
        if "[MASK]" in lines:
            return whole_number(lines.index("[MASK]"), f"the line of [MASK] in {path}", vocab - 1)
    return None


def _save(folder: Path, arrays: Any, extra: dict[str, Any]) -> int:
    """Write step 0: parameters alone, one array after the other onto the CPU."""
    import jax

    from shardtrain.checkpoints.checkpointer import Checkpoints
    from shardtrain.checkpoints.policy import CheckpointPolicy

    cpu = jax.local_devices(backend="cpu")[0]
    flat = {f"{PARAMS}{path}": jax.device_put(array, cpu) for path, array in arrays}
    with Checkpoints(folder, CheckpointPolicy()) as checkpoints:
        checkpoints.save(0, flat, extra)
    return sum(array.size for array in flat.values())


def _converter(name: str, function: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {name!r}; give one that has {function}") from None
    if not hasattr(module, function):
        raise ValueError(f"{name} has no {function}; see {CONVERTER} for what it takes and returns")
    return getattr(module, function)


def _model_options(extra: Mapping[str, Any], run_file: str | None) -> dict[str, Any]:
    """Return the options of the model, by name: of the run file, or those in the checkpoint.

    Raises:
      ValueError: they are not known.
    """
    if run_file is not None:
        from shardtrain.cli.run_file import load_run

        model = load_run(run_file).model
        if not is_dataclass(model) or isinstance(model, type):
            raise ValueError(f"the model of {run_file} is {model!r}; only a dataclass has options to write")
        return asdict(model)
    run = extra.get("run") or {}
    found = {name.removeprefix(MODEL): run[name] for name in run if name.startswith(MODEL)}
    if not found:
        raise ValueError(
            "the checkpoint lacks its model's options; give the run file that it was trained with:"
            " --run-file examples/gpt_text.py"
        )
    return found
