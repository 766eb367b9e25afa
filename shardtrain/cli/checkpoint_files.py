"""`shardtrain checkpoint export` and `import`: convert checkpoints to and from other programs' files.

A converter is a module that is imported by its name, as a user's own model is: any module that has
`export_model` and `import_model` like the default converter.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardtrain.checkpoints.evaluated_params import make_exported_params
from shardtrain.cli.checkpoint_path import CHECKPOINTS, MODEL, find_checkpoint_path, select_options
from shardtrain.errors.messages import refuse
from shardtrain.errors.options import list_plain_options
from shardtrain.imported import MODEL_FILE, TOKENS, select_kept_tokens, write_about
from shardtrain.report.quantities import bytes_text
from shardtrain.system import terminal
from shardtrain.system.atomic_write import new_folder, refuse_filled
from shardtrain.system.lazy_array import LazyArray
from shardtrain.system.untrusted_files import check_whole_number, read_bytes, read_json, read_text

CONVERTER = "shardtrain.models.huggingface.files"
PARAMS, STATE, BASE = "params/", "model_state/", "base"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the parameters of a step as a folder that Hugging Face's `transformers` loads unchanged.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step; RUN@20 names step 20.
      out: the folder to write.
      step: number of the step. None means the newest.
      dtype: dtype of the written weights: float32, bfloat16 or float16.
      max_shard_bytes: largest size of a file of weights; larger models are split over several files.
      tokenizer: folder with tokenizer files to copy. None means tokenizer/ in the run's folder.
      run_file: the run file that trained the model; needed only if the checkpoint lacks the model's options.
      adapters: write only the low-rank adapters, in the form that the PEFT library loads. Without it, they
        are merged into the weights.
      family: model_type of the written model, such as phi3. None means the first family that has all options
        of the model.
      base: the folder that the run started from, of Hugging Face or of a run. It is needed if the checkpoints
        contain only the trained parameters.
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
    family: str | None = None
    base: Path | None = None
    using: str = CONVERTER


@dataclass(frozen=True, kw_only=True)
class Import:
    """Convert a Hugging Face model folder (Llama, BERT, ViT, ResNet, ...) to a checkpoint to start from.

    Args:
      folder: a folder with config.json, model.safetensors (or several and their index), and tokenizer files.
      out: the folder to write: a checkpoint, a run file that trains it further, and the tokenizer.
      adapter: folder with low-rank adapters of the PEFT library for this model. They are added to its
        parameters, to be trained further or merged by an export. None adds no adapters.
      using: name of the Python module that converts the files.
    """

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    adapter: Path | None = None
    using: str = CONVERTER


def export_checkpoint(options: Export) -> int:
    """Export a checkpoint and return 0.

    Raises:
      ValueError: the step is broken, or of a model that the converter does not know.
    """
    place = find_checkpoint_path(options.run, options.step)
    reader = place.reader()
    refuse(f"step {reader.step} is broken and is not exported", reader.problems())
    if not options.adapters and BASE in reader.extra:
        from shardtrain.trainer.pretrained import add_base
        from shardtrain.trainer.resume import find_parameters

        reader = add_base(reader, options.base and find_parameters(options.base), "give --base FOLDER")
    model = _model_options(reader.extra, options.run_file)
    leaves = {
        path.removeprefix(PARAMS): leaf
        for path, leaf in reader.leaves.items()
        if path.startswith((PARAMS, STATE))
    }
    kept = place.folder.parent / TOKENIZER
    exported = make_exported_params(
        reader.extra.get("run", {}).get("evaluate_with"), reader.leaves, reader.read
    )
    files = _converter(options.using, "export_model")(
        options.out,
        model,
        {path: tuple(leaf.shape) for path, leaf in leaves.items()},
        lambda path: LazyArray(partial(reader.read if path.startswith(STATE) else exported, path)),
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        tokenizer=options.tokenizer or (kept if kept.is_dir() else None),
        **{name: x for name in ("adapters", "family") if (x := getattr(options, name))},
        **select_kept_tokens(reader.extra),
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
    # configuration and tokenizer are read at once, arrays one by one as they are saved
    adapter = {} if options.adapter is None else {"adapter": options.adapter}
    found = _converter(options.using, "import_model")(options.folder, **adapter)
    config = found.config
    data_kind = find_training_kind(config)
    token = find_mask_token(found.tokenizer, config.vocab) if data_kind == "masked tokens" else None
    extra = {
        "imported": {"family": found.family, "name": options.folder.resolve().name},
        "run": {MODEL + name: value for name, value in list_plain_options(config).items()},
        # a user's own converter may not set them
        **select_kept_tokens({TOKENS: getattr(found, TOKENS, None)}),
    }
    # write model, run file, checkpoint and tokenizer; the folder gets its name when all is there
    with new_folder(options.out) as filled:
        write_about(filled / MODEL_FILE, config, token)
        (filled / RUN_FILE).write_text(run_file_text(type(config), data_kind))
        num_params = _save(filled / CHECKPOINTS, found.arrays, extra)
        for path in found.tokenizer:
            (filled / TOKENIZER).mkdir(exist_ok=True)
            (filled / TOKENIZER / path.name).write_bytes(read_bytes(path))
    # print missing and skipped parts, and how to train further
    if data_kind == "masked tokens" and token is None:
        terminal.out(
            f'the number of [MASK] was not found: write it as "mask_token" into {options.out / MODEL_FILE}\n'
        )
    for name in found.left_out:
        terminal.out(f"skipped, as the model has no such array: {name}\n")
    terminal.out(
        f"{found.family}: {num_params:,} parameters -> {options.out}\n"
        f"in a run file of your own: model={model_text(found.config)}\n"
        f"train on: {shlex.join(['shardtrain', 'train', str(options.out / RUN_FILE)])}"
        " (its first lines describe the data)\n"
    )
    return 0


def model_text(config: Any) -> str:
    """Format a configuration as Python, without default options: `DecoderConfig(vocab=256, ...)`."""
    values = [(field, getattr(config, field.name)) for field in fields(config)]
    inside = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
    return f"{type(config).__name__}({inside})"


def find_mask_token(tokenizer: list[Path], vocab: int) -> int | None:
    """Return the number of [MASK] in tokenizer files; None if it is not found.

    Raises:
      ValueError: a file is not of its form, or the number is not below `vocab`.
    """
    by_name = {path.name: path for path in tokenizer}
    if path := by_name.get("tokenizer.json"):
        content = read_json(path)
        added = content.get("added_tokens") if isinstance(content, dict) else None
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and token.get("content") == "[MASK]":
                return check_whole_number(token.get("id"), f"the id of [MASK] in {path}", vocab - 1)
    if path := by_name.get("vocab.txt"):
        lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
        if "[MASK]" in lines:
            return check_whole_number(lines.index("[MASK]"), f"the line of [MASK] in {path}", vocab - 1)
    return None


def _save(folder: Path, arrays: Any, extra: dict[str, Any]) -> int:
    """Write parameters and running statistics as step 0, and return the number of parameters."""
    import jax

    from shardtrain.checkpoints.checkpointer import Checkpoints
    from shardtrain.checkpoints.policy import CheckpointPolicy
    from shardtrain.trainer.pretrained import array_path

    cpu = jax.local_devices(backend="cpu")[0]
    flat = {array_path(path): jax.device_put(array, cpu) for path, array in arrays}
    with Checkpoints(folder, CheckpointPolicy()) as checkpoints:
        checkpoints.save(0, flat, extra)
    return sum(array.size for path, array in flat.items() if path.startswith(PARAMS))


def _converter(name: str, function: str) -> Any:
    from shardtrain.cli.run_file import load_module

    module = load_module(name, f"give one that has {function}")
    if not hasattr(module, function):
        raise ValueError(f"{name} has no {function}; see {CONVERTER} for its arguments and results")
    return getattr(module, function)


def _model_options(extra: Mapping[str, Any], run_file: str | None) -> dict[str, Any]:
    """Return the options of the model by name, from the run file or else from the checkpoint.

    Raises:
      ValueError: they are not known.
    """
    if run_file is not None:
        from shardtrain.cli.run_file import load_run

        model = load_run(run_file).model
        if not is_dataclass(model) or isinstance(model, type):
            raise ValueError(f"the model of {run_file} is {model!r}; only a dataclass has options to write")
        return list_plain_options(model)
    found = select_options(extra.get("run") or {}, MODEL)
    if not found:
        raise ValueError(
            "the checkpoint lacks its model's options; give the run file that it was trained with:"
            " --run-file examples/gpt_text.py"
        )
    return found


RUN_FILE = "run.py"

TrainedOn = Literal["tokens", "masked tokens", "images", "pairs"]


def find_training_kind(config: Any) -> TrainedOn:
    """Return what a model trains on, by its options: bidirectional attention needs masked tokens."""
    if hasattr(config, "colours"):
        return "images"
    if hasattr(config, "num_decoder_layers"):
        return "pairs"
    return "masked tokens" if hasattr(config, "segments") else "tokens"


def run_file_text(kind: type, data_kind: TrainedOn) -> str:
    """Return the text of the run file, which contains no text of the imported files.

    Args:
      kind: the class of the model's configuration.
      data_kind: what it trains on.

    Raises:
      ValueError: the class cannot be imported by its name.
    """
    if not all(part.isidentifier() for part in (*kind.__module__.split("."), kind.__qualname__)):
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name")
    data = 'Tokens(path=Path("tokens.npy"), vocab=model.vocab, seq=min(model.seq, 1024))'
    more, readers, names = "", ["read_model"], ["Optimizer", "Run", "Schedule", "StartFrom"]
    about = "Its tokens are those of its tokenizer: write them with `shardtrain.data.write_tokens`, then"
    words = "--data.path my_tokens.npy"
    if data_kind == "images":
        data = 'ImageFiles(paths=(Path("images"),), classes=model.classes, size=model.height)'
        more = '        loss=classification_loss,\n        unit="examples",\n'
        names += ["ImageFiles", "classification_loss"]
        about = "Its images are in folders, one for each class, in the order of their names:"
        words = "--data my_images/"
    elif data_kind == "pairs":
        lines = ("TokenPairs(", '    source=Path("source.npy"),', '    target=Path("target.npy"),')
        lines += ("    vocab=model.vocab,", "    source_seq=min(model.seq, 512),")
        data, more = "\n        ".join((*lines, ")")), "        loss=translation_loss,\n"
        names += ["TokenPairs", "translation_loss"]
        words = "--data.source my_source.npy --data.target my_target.npy"
    elif data_kind == "masked tokens":
        token = f'read_mask_token(FOLDER / "{MODEL_FILE}", model.vocab)'
        lines = ("MaskedTokens(", f"    data={data},", f"    mask_token={token},", ")")
        data, more = "\n        ".join(lines), "        loss=masked_token_loss,\n"
        names += ["Tokens", "MaskedTokens", "masked_token_loss"]
        readers, words = ["read_mask_token", "read_model"], "--data.data.path my_tokens.npy"
    else:
        names.append("Tokens")
    names.sort(key=lambda name: (not name[0].isupper(), name))
    return f'''"""Trains the imported checkpoint in this folder further; {MODEL_FILE} describes its model.

{about}

shardtrain train {RUN_FILE} {words}
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
{more}        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-5, warmup=100)),
        start_from=StartFrom(checkpoint=FOLDER),
        run_dir=Path("runs") / FOLDER.name,
    )
'''
