"""Options that replace several values of the run file at once: a strategy file, a preset, a layout file.

Next: `run_options.py`, whose options then change single fields.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from shardtrain.cli.field_options import with_fields
from shardtrain.combine.synchronisation import preset
from shardtrain.islands.cluster import Cluster, read_cluster
from shardtrain.sharding.layout_file import read_layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy, read_strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Options that replace values of the run file, before all others change single fields.

    Args:
      strategy: a strategy file, such as the strategy.toml of a run folder.
      synchronisation: a way to synchronise replicas, by name: every-step, local-sgd, diloco,
        streaming-diloco, adasum-deltas or hierarchical; its fields are the options beside it.
      cluster: a cluster file, such as meshes/two_kinds_of_islands.toml: its kinds of islands may have fields
        of the strategy that differ; sections of the strategy itself win.
    """

    strategy: Path | None = None
    synchronisation: str | None = None
    cluster: Path | None = None


def strategy_of(words: Sequence[str]) -> Strategy | None:
    """Return the strategy that `--strategy FILE` names; None without it.

    Raises:
      ValueError: it cannot be read.
    """
    given = _given(words, "--strategy")
    return read_strategy(Path(given[-1])) if given else None


def with_files(run: Run, words: Sequence[str]) -> Run:
    """Return the run with the files and presets that the command line names.

    Raises:
      ValueError: one of them cannot be read, or is not known.
    """
    return _with_mesh_file(_with_strategy(run, words), words)


def _with_strategy(run: Run, words: Sequence[str]) -> Run:
    """Replace the strategy by that of `--strategy FILE`, and its synchronisation by a preset."""
    if (strategy := strategy_of(words)) is not None:
        run = with_fields(run, {"strategy": strategy})
    if given := _given(words, "--synchronisation"):
        run = with_fields(run, {"strategy.synchronisation": preset(given[-1])})
    if (cluster := cluster_of(words)) is not None:
        sections, own = cluster.strategy_sections, run.strategy.islands
        merged = {name: {**section, **own.get(name, {})} for name, section in sections.items()}
        run = with_fields(
            run, {"strategy.islands": {**merged, **{k: own[k] for k in own if k not in merged}}}
        )
    return run


def cluster_of(words: Sequence[str]) -> Cluster | None:
    """Return the cluster that `--cluster FILE` names; None without it.

    Raises:
      ValueError: it cannot be read.
    """
    given = _given(words, "--cluster")
    return read_cluster(Path(given[-1])) if given else None


def _given(words: Sequence[str], *names: str) -> list[str]:
    """Return the values of an option on the command line."""
    return [
        value if equals else next(iter(words[number + 1 :]), "")
        for number, word in enumerate(words)
        for name, equals, value in [word.partition("=")]
        if name in names
    ]


def _with_mesh_file(run: Run, words: Sequence[str]) -> Run:
    """Replace the layout by that of `--mesh FILE`, so that other options change the file's values."""
    given = _given(words, "--mesh", "--strategy.layout.mesh")
    if given and is_layout_file(given[-1]):
        return with_fields(run, {"strategy.layout": read_layout(Path(given[-1]))})
    return run


def is_layout_file(mesh: str) -> bool:
    """Return whether the value of --mesh names a layout file."""
    return mesh.endswith(".toml") or Path(mesh).is_file()
