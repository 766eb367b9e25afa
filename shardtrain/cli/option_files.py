"""Apply options that replace many fields of a run: a strategy, layout or cluster file, a preset, a model.

Next: `run_options.py`, whose options then change single fields.
"""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shardtrain.cli.arguments import find_values
from shardtrain.cli.field_options import replace_fields
from shardtrain.combine.synchronisation import preset
from shardtrain.data.mixture import Mixture
from shardtrain.data.tokenizer import BYTES, TOKENIZER_FILE
from shardtrain.islands.cluster import Cluster, read_cluster
from shardtrain.sharding.layout_file import read_layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.pretrained import is_pretrained, keep_training_options, read_lora, read_pretrained
from shardtrain.trainer.strategy import Strategy, read_strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Options that replace many fields of the run file, before other options change single fields.

    Args:
      strategy: strategy file, such as the strategy.toml of a run folder.
      synchronisation: preset of the options that synchronise replicas: every-step, local-sgd, diloco,
        streaming-diloco, adasum-deltas or hierarchical. Options of its fields override the preset.
      cluster: cluster file, such as meshes/two_kinds_of_islands.toml. It may set other fields of the strategy
        for each kind of islands; sections of the strategy itself take precedence.
    """

    strategy: Path | None = None
    synchronisation: str | None = None
    cluster: Path | None = None


def read_given_strategy(words: Sequence[str]) -> Strategy | None:
    """Read the strategy that `--strategy FILE` names; return None without the option.

    Raises:
      ValueError: it cannot be read.
    """
    given = find_values(words, "--strategy")
    return read_strategy(Path(given[-1])) if given else None


def apply_files(run: Run, words: Sequence[str]) -> Run:
    """Apply the files and presets that the command line names to a run.

    Raises:
      ValueError: one of them cannot be read, or is not known.
    """
    # the model of Hugging Face that the run starts from
    given = find_values(words, "--start-from", "--start-from.checkpoint")
    if given and is_pretrained(Path(given[-1])):
        model = keep_training_options(read_pretrained(given[-1]), run.model)
        if adapter := find_values(words, "--start-from.adapter"):
            model = dataclasses.replace(model, lora=read_lora(adapter[-1], model))
        run = dataclasses.replace(run, model=model)
    # the strategy file, the preset of synchronisation, the sections of the cluster file, the layout file
    if (strategy := read_given_strategy(words)) is not None:
        run = replace_fields(run, {"strategy": strategy})
    if given := find_values(words, "--synchronisation"):
        run = replace_fields(run, {"strategy.synchronisation": preset(given[-1])})
    if (cluster := read_given_cluster(words)) is not None:
        own = run.strategy.islands
        merged = {name: {**each, **own.get(name, {})} for name, each in cluster.strategy_sections.items()}
        # a section of the strategy itself keeps its values, and its place after those of the cluster
        rest = {name: section for name, section in own.items() if name not in merged}
        run = replace_fields(run, {"strategy.islands": {**merged, **rest}})
    given = find_values(words, "--mesh", "--strategy.layout.mesh")
    if given and is_layout_file(given[-1]):
        run = replace_fields(run, {"strategy.layout": read_layout(Path(given[-1]))})
    return run


def adopt_tokenizer(run: Run, changes: Collection[str]) -> Run:
    """Let data that would read bytes use the tokenizer of the Hugging Face model that a run starts from.

    Args:
      run: the run.
      changes: paths of the fields that the command line sets; without start_from, nothing changes.
    """
    folder = run.start_from.checkpoint
    if "start_from.checkpoint" not in changes:
        return run
    if folder is None or not is_pretrained(folder) or not (folder / TOKENIZER_FILE).is_file():
        return run
    return dataclasses.replace(run, data=_replace_tokenizer(run.data, str(folder), "data", changes))


def _replace_tokenizer(data: Any, tokenizer: str, name: str, changes: Collection[str]) -> Any:
    """Set the tokenizer of data, or of the parts of a mixture, that would read bytes.

    Args:
      data: the data of the run.
      tokenizer: the folder of the tokenizer.
      name: path of the data's fields.
      changes: paths of the fields that the command line sets, which are kept.
    """
    if isinstance(data, Mixture):
        parts = {
            part: _replace_tokenizer(each, tokenizer, f"{name}.parts.{part}", changes)
            for part, each in data.parts.items()
        }
        return dataclasses.replace(data, parts=parts)
    if f"{name}.tokenizer" in changes or getattr(data, "tokenizer", None) != BYTES:
        return data
    return data.replace_tokenizer(tokenizer) if hasattr(data, "replace_tokenizer") else data


def read_given_cluster(words: Sequence[str]) -> Cluster | None:
    """Read the cluster that `--cluster FILE` names; return None without the option.

    Raises:
      ValueError: it cannot be read.
    """
    given = find_values(words, "--cluster")
    return read_cluster(Path(given[-1])) if given else None


def is_layout_file(mesh: str) -> bool:
    """Return whether the value of --mesh names a layout file."""
    return mesh.endswith(".toml") or Path(mesh).is_file()
