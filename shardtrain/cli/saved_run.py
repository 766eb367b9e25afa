"""Open the folder of a run to use its trained model: find checkpoint, model, layout and tokenizer.

Decoders and encoder-decoders of `shardtrain.models` are made from the options in a checkpoint; any other
model needs its run file. Next: `generate.py`, `evaluate.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from shardtrain import axes
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.cli.arguments import parse_words
from shardtrain.cli.checkpoint_files import TOKENIZER
from shardtrain.cli.checkpoint_path import MODEL, find_checkpoint_path, select_options
from shardtrain.cli.compilation import CompileOptions, cache_programs, set_xla_flags
from shardtrain.cli.run_file import is_layout_file, load_run
from shardtrain.cli.run_options import DeviceOptions
from shardtrain.data import Text
from shardtrain.data.token_manifest import MANIFEST, read_manifest
from shardtrain.data.tokenizer import BYTES, TOKENIZER_FILE
from shardtrain.errors.messages import problems_error, refuse
from shardtrain.imported import option_problems
from shardtrain.sharding.axis_sizes import parse_mesh
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.layout_file import read_layout
from shardtrain.system import terminal
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import read_bytes
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.pretrained import add_base
from shardtrain.trainer.resume import find_parameters
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.trained_model import RestoredModel, restore_model

DECODER = "shardtrain.models.decoder:DecoderConfig"
PAIR = "shardtrain.models.encoder_decoder:EncoderDecoderConfig"
GPT = "shardtrain.models.gpt:GptConfig"
LAYOUT = "strategy.layout."


@dataclass(frozen=True, kw_only=True)
class SavedOptions(DeviceOptions, CompileOptions):
    """Options of commands that use a trained model.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of a step; RUN@20 names step 20, and
        RUN@best the best step.
      step: number of the step. None means the newest.
      mesh: sizes of the mesh axes, such as data=2,tensor=4, or a layout file. None means the mesh of the run
        if it fits the devices, else all devices along data.
      run_file: the run file that trained the model; needed for models that are not decoders or
        encoder-decoders of this library, or its GPT.
      tokenizer: bytes, or the path of a tokenizer.json or of a folder with one. None means the run's
        tokenizer.
      evaluated: use the parameters that the run evaluates, such as their average, instead of the trained
        ones.
      base: the folder that the run started from, of Hugging Face or of a run. It is needed if the checkpoints
        contain only the trained parameters.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    step: int | None = None
    mesh: str | None = None
    run_file: Annotated[str | None, tyro.conf.arg(name="run-file")] = None
    tokenizer: str | None = None
    evaluated: bool = True
    base: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run that was opened from its folder.

    Args:
      given: the options that name it.
      reader: the reader of the checkpoint.
      folder: the run's folder.
      options: the options of the run by name, as in `run.txt`; {} for imported parameters.
      run: the run, with the model, and with the layout on this machine. Its data is a placeholder, unless a
        run file was given.
      is_decoder: whether the model is a decoder or the GPT of this library.
      is_encoder_decoder: whether it is an encoder-decoder of this library.
      takes_cache: whether it caches keys and values between tokens.
    """

    given: SavedOptions
    reader: CheckpointReader
    folder: Path
    options: Mapping[str, Any]
    run: Run
    is_decoder: bool
    is_encoder_decoder: bool
    takes_cache: bool

    @property
    def seq(self) -> int:
        """The number of positions of the model; if it has no such option, of the data.

        Raises:
          ValueError: neither is known.
        """
        found = getattr(self.run.model, "seq", None) or self.options.get("data.seq")
        if not isinstance(found, int):
            raise ValueError(
                "the number of positions of the model is not known: neither model nor data have seq"
            )
        return found

    @property
    def tokenizer(self) -> str:
        """The tokenizer of the run: `bytes`, or the path of a tokenizer.json or of its folder.

        Raises:
          ValueError: no tokenizer or several are known.
        """
        if self.given.tokenizer is not None:
            return self.given.tokenizer
        found = {str(name): None for name in _list_tokenizers(self.folder, self.options)}
        if not found and getattr(self.run.model, "vocab", None) == 256:
            found = {BYTES: None}  # the vocabulary of bytes
        if len(found) != 1:
            several = f"several tokenizers ({', '.join(found)})" if found else "no tokenizer"
            raise ValueError(
                f"{self.folder} has {several}; name one: --tokenizer bytes, or --tokenizer"
                " path/tokenizer.json"
            )
        return next(iter(found))

    def restore(self) -> RestoredModel:
        """Restore the model on the mesh, see `restore_model`."""
        layout = self.run.strategy.layout
        return restore_model(self.reader, make_model(self.run), layout, evaluated=self.given.evaluated)


def use_model(command: str, kind: type[SavedOptions], arguments: Sequence[str], use: Any) -> int:
    """Parse and check the options of a command that uses a trained model, call `use` with them; return 0."""
    flags_text = set_xla_flags(arguments)
    options: Any = parse_words(kind, list(arguments), prog=f"shardtrain {command}")
    options.check()
    with cache_programs(flags_text):
        use(options)
    return 0


def open_run(given: SavedOptions) -> SavedRun:
    """Find the checkpoint that options name, and make its run.

    Raises:
      FileNotFoundError: there is no such folder, or no such run file.
      ValueError: the checkpoint is broken; or its model is no text model of this library, and there is no run
        file.
    """
    path = find_checkpoint_path(given.run, given.step)
    reader = path.reader()
    refuse(f"step {reader.step} is broken; give another", reader.problems())
    reader = add_base(reader, given.base and find_parameters(given.base), "give --base FOLDER")
    options = dict(reader.extra.get("run") or {})
    layout = _layout(options, given.mesh)
    strategy = Strategy(layout=layout, compute_dtype=options.get("strategy.compute_dtype"))
    own = select_options(options, MODEL)
    if given.run_file is None:
        model = _make_model(given.run, reader.extra.get("model"), own)
        run = Run(model=model, data=Text(seq=model.seq), strategy=strategy, run_dir=path.folder.parent)
    else:
        run = replace(load_run(given.run_file), strategy=strategy, run_dir=path.folder.parent)
        if is_dataclass(run.model) and not isinstance(run.model, type):
            # the command line of the run may have changed them
            known = [field.name for field in fields(run.model)]
            changed: dict[str, Any] = {name: own[name] for name in known if name in own}
            run = replace(run, model=replace(run.model, **changed))
    names = ",".join(f"{axis}={size}" for axis, size in layout.mesh.items())
    terminal.err(f"step {reader.step} of {path.folder.parent} on mesh {names}\n")
    return SavedRun(
        given=given,
        reader=reader,
        folder=path.folder.parent,
        options=options,
        run=run,
        is_decoder=isinstance(run.model, _find_class(DECODER) | _find_class(GPT)),
        is_encoder_decoder=isinstance(run.model, _find_class(PAIR)),
        takes_cache=isinstance(run.model, _find_class(DECODER) | _find_class(PAIR)),
    )


def _make_model(run: str, named: str | None, own: dict[str, Any]) -> Any:
    """Make the configuration of a text model of this library from a run's options.

    Args:
      run: the run as it was given, for messages.
      named: module:class of its model; earlier checkpoints do not have it.
      own: the options of its model.
    """
    if not own:
        raise ValueError(
            "the checkpoint lacks its model's options; give the run file that it was trained with:"
            " --run-file examples/linen_text.py"
        )
    name = named or (DECODER if option_problems(_find_class(PAIR), own) else PAIR)
    problems = [f"its class is {short(name)}"]
    if name in (DECODER, PAIR, GPT) and not (problems := option_problems(_find_class(name), own)):
        return _find_class(name)(**own)
    raise problems_error(
        f"the model of {run} is no text model of this library; give the run file that it was trained with:"
        " --run-file my_run.py",
        problems,
    )


def _find_class(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind)


def _layout(options: Mapping[str, Any], mesh: str | None) -> Layout:
    """Return the layout for this machine: the rules of the run on the given mesh, or on its own.

    Raises:
      ValueError: its mesh shards layers over stages, or sequences.
    """
    if mesh is not None and is_layout_file(mesh):
        layout = read_layout(Path(mesh))
    else:
        parameters, activations = (
            {name: tuple(over) for name, over in select_options(options, f"{LAYOUT}{kind}.").items()}
            for kind in ("parameters", "activations")
        )
        layout = Layout(
            mesh=_own_mesh(options) if mesh is None else parse_mesh(mesh),
            parameters=parameters,
            activations=activations,
            unnamed=options.get(f"{LAYOUT}unnamed", "refuse"),
        )
    split = [axis for axis in (axes.PIPELINE, axes.CONTEXT) if layout.mesh.get(axis, 1) != 1]
    if split:
        raise ValueError(
            f"the mesh has {' and '.join(split)}, and this command has neither stages nor parts of sequences;"
            " use data, fsdp and tensor"
        )
    return replace(layout, sequence_sharded=False, collective_matmul=False)


def _own_mesh(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the mesh of the run, without pipeline and context, if it fits the devices; else only data."""
    own = select_options(options, f"{LAYOUT}mesh.")
    # pipeline shards parameters, as fsdp does; context shards a batch, as data does
    for axis, other in ((axes.PIPELINE, axes.FSDP), (axes.CONTEXT, axes.DATA)):
        if (size := own.pop(axis, 1)) != 1:
            both = (size, own.get(other, 1))
            own[other] = -1 if -1 in both else math.prod(both)
    num_devices = jax.device_count()
    rest = -1 in own.values()
    fixed = math.prod(size for size in own.values() if size != -1)
    fits = num_devices % fixed == 0 if rest else num_devices == fixed
    return own if own and fits else {axes.DATA: -1}


def _list_tokenizers(folder: Path, options: Mapping[str, Any]) -> list[Any]:
    """Return the tokenizers in a run's folder, or else the ones that the options of its data name."""
    if (folder / TOKENIZER / TOKENIZER_FILE).is_file():
        return [folder / TOKENIZER]
    made = sorted({read_bytes(path): path for path in folder.glob(f"tokens-*/{TOKENIZER_FILE}")}.values())
    if made:
        return made
    data = {name: value for name, value in options.items() if name.startswith("data.")}
    paths = [Path(each) for name, of in data.items() if name.endswith(".paths") for each in of or ()]
    folders = [read_manifest(path).tokenizer for path in paths if (path / MANIFEST).is_file()]
    return folders or [
        value for name, value in data.items() if name.rpartition(".")[2] == "tokenizer" and value
    ]
