"""Train on a mixture of data: samples of several sources in given proportions.

Next: `balanced_draws.py` (the order of the sources), `batches.py` (the order within each source).
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.data.balanced_draws import BLOCK, compute_borders, count_before, draw_block
from shardtrain.data.order import epoch_order
from shardtrain.data.samples import Source
from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import near, refuse

NUM_DRAWS = 1 << 40
"""The length of a mixture, larger than any run reaches."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a mixture, with constant proportions.

    Args:
      start: the first draw.
      parts: the start of each source's part of the interval, see `compute_borders`.
      before: number of draws of each source in earlier stages.
    """

    start: int
    parts: tuple[int, ...]
    before: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MixedSource:
    """Samples of several sources, by number of the draw; a draw does not depend on earlier calls.

    Each source is read in its own random order, epoch after epoch: each sample once before any is repeated. A
    stream is read in its own order.

    Args:
      sources: the sources.
      weights: (first draw, weight of each source) of each stage; draws rise from 0.
      seed: the seed of all orders.
    """

    sources: tuple[Source, ...]
    weights: tuple[tuple[int, tuple[float, ...]], ...]
    seed: int

    ordered = True
    """Batches take these samples in sequence, without shuffling."""

    @property
    def is_stream(self) -> bool:
        """Whether any source is a stream, which each process reads from its beginning."""
        return any(getattr(source, "is_stream", False) for source in self.sources)

    def __len__(self) -> int:
        return NUM_DRAWS

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """Return the sample of a draw."""
        source, sample, _ = self.draw(index)
        return self.sources[source][sample]

    def augmented(self, index: int, epoch: int, random: np.random.Generator) -> Mapping[str, np.ndarray]:
        """Return the sample of a draw, with random changes if its source has a method `augmented`.

        Args:
          index: the number of the draw.
          epoch: not used; the source gets its own epoch.
          random: draws the changes.
        """
        source, sample, own_epoch = self.draw(index)
        if not hasattr(self.sources[source], "augmented"):
            return self.sources[source][sample]
        return self.sources[source].augmented(sample, own_epoch, random)  # type: ignore[attr-defined]

    def draw(self, index: int) -> tuple[int, int, int]:
        """Return (source, its sample, number of earlier epochs of the source) of a draw.

        Raises:
          IndexError: no such draw.
        """
        if not 0 <= index < NUM_DRAWS:
            raise IndexError(f"draw {index} of {NUM_DRAWS}")
        source, count = self._count(index)
        if getattr(self.sources[source], "is_stream", False):
            return source, count, 0
        epoch, position = divmod(count, len(self.sources[source]))
        # each source has its own seed, or sources of equal length would be read in the same order
        seed = int(np.random.SeedSequence((self.seed, source)).generate_state(1)[0])
        return source, epoch_order(len(self.sources[source]), seed, epoch)(position), epoch

    @property
    def fingerprint(self) -> str:
        """A hash of the sources, their weights and the seed."""
        prints = [getattr(source, "fingerprint", None) for source in self.sources]
        return hashlib.sha256(repr((prints, self.weights, self.seed)).encode()).hexdigest()[:16]

    @property
    def num_skipped(self) -> int | None:
        """Number of samples or documents that the sources have left out; None means that none may be."""
        found = [getattr(source, "num_skipped", None) for source in self.sources]
        return None if all(each is None for each in found) else sum(each or 0 for each in found)

    @property
    def skipped_rows(self) -> dict[int, Any]:
        """Number of a source -> the rows that it has left out in this process."""
        return {i: rows for i, x in enumerate(self.sources) if (rows := getattr(x, "skipped_rows", None))}

    def add_skipped(self, rows: Mapping[int, Any]) -> None:
        """Count rows that another process has left out."""
        for number, of_source in rows.items():
            self.sources[number].add_skipped(of_source)  # type: ignore[attr-defined]

    def _count(self, index: int) -> tuple[int, int]:
        """Return the source of a draw, and the number of earlier draws of that source."""
        stage = next(each for each in reversed(self._stages) if each.start <= index)
        block, place = divmod(index - stage.start, BLOCK)
        sources, counts = draw_block(stage.parts, self._offset, block)
        source = int(sources[place])
        return source, int(counts[place]) + stage.before[source]

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return make_stages(self.weights, len(self.sources), self._offset)

    @cached_property
    def _offset(self) -> int:
        return int.from_bytes(hashlib.sha256(f"mixture {self.seed}".encode()).digest()[:8], "little")


def make_stages(
    weights: tuple[tuple[int, tuple[float, ...]], ...], num_sources: int, offset: int
) -> tuple[Stage, ...]:
    """Return the stages, each with the number of earlier draws of each source."""
    stages: list[Stage] = []
    for start, of_sources in weights:
        before = (0,) * num_sources
        if stages:
            last = stages[-1]
            before = tuple(
                count + count_before(last.parts, offset, source, start - last.start)
                for source, count in enumerate(last.before)
            )
        stages.append(Stage(start=start, parts=compute_borders(of_sources), before=before))
    return tuple(stages)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Train on samples of several data in given proportions, whatever their sizes.

    All parts have samples of the same shapes, so proportions of samples are also proportions of tokens. A
    part that is too small for its proportion is read again in another order, each sample once before any is
    repeated; a stream is read in its own order. Each part is evaluated under its name.

    Args:
      parts: name -> data, such as a corpus.
      weights: proportions of the parts, as in "web 0.7 code 0.3"; their sum need not be 1. In Python also
        name -> proportion.
      later: proportions of later samples: "1000000: web 1 code 3; 2000000: code 1" changes them from the
        samples with these numbers on; parts that are not named get 0.
      seed: the seed of the order of all samples.

    Raises:
      ValueError: lists every value of a wrong type, or every one that is out of range.

    >>> from shardtrain.data.text import Text
    >>> mixture = Mixture(parts={"a": Text(), "b": Text()}, weights={"a": 3, "b": 1}, later="8: b 1")
    >>> mixture.stages()
    ((0, (3.0, 1.0)), (8, (0.0, 1.0)))
    """

    parts: Mapping[str, Any]
    weights: Any
    later: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.weights, Mapping):
            text = " ".join(f"{name} {weight}" for name, weight in self.weights.items())
            object.__setattr__(self, "weights", text)
        refuse("this mixture cannot be used", wrong_types(self))
        problems = [
            f"parts[{name!r}] is {type(data).__name__}, without {method}; give data such as a Corpus"
            for name, data in self.parts.items()
            for method in ("train", "heldout")
            if not callable(getattr(data, method, None))
        ]
        if not self.parts:
            problems.append("parts is empty; give a name and data for each source")
        if odd := [name for name in self.parts if not re.fullmatch(r"[\w.-]+", name)]:
            problems.append(
                f"parts has {', '.join(map(repr, odd))}; use names of letters, digits, _, - and ."
            )
        problems += too_small(self, seed=0)
        if not problems:
            try:
                self.stages()
            except ValueError as error:
                problems.append(str(error))
        refuse("this mixture cannot be used", problems)

    @property
    def vocab(self) -> int:
        """The size of the vocabulary, the same for all parts.

        Raises:
          ValueError: the vocabularies of the parts differ.
        """
        found = {name: part.vocab for name, part in self.parts.items()}
        if len(set(found.values())) > 1:
            sizes = ", ".join(f"{name} {vocab}" for name, vocab in found.items())
            raise ValueError(f"the parts' vocabularies differ: {sizes}; give them tokens of one tokenizer")
        return next(iter(found.values()))

    def stages(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Return (first sample, weight of each part) of each stage.

        Raises:
          ValueError: `weights` or `later` cannot be read.
        """
        weights = read_weights(self.weights, self.parts, "weights")
        if missing := [name for name in self.parts if name not in weights]:
            raise ValueError(f"weights lacks {', '.join(missing)}; give each part a weight")
        found = [(0, tuple(weights[name] for name in self.parts))]
        for text in filter(None, (part.strip() for part in self.later.split(";"))):
            start, colon, words = text.partition(":")
            number = start.strip()
            if not (colon and number.isascii() and number.isdecimal() and int(number) > found[-1][0]):
                raise ValueError(
                    f"later has {text!r}; write the number of a sample, rising, and names with weights, as in"
                    " '1000000: web 1 code 3; 2000000: code 1'"
                )
            weights = read_weights(words, self.parts, f"later, from {number},")
            found.append((int(number), tuple(weights.get(name, 0.0) for name in self.parts)))
        return tuple(found)

    def train(self, folder: Path) -> MixedSource:
        """Return the samples to train on; `folder` is the run folder, where parts write files.

        Raises:
          ValueError: a part has no samples.
        """
        sources = {name: part.train(folder) for name, part in self.parts.items()}
        if empty := [name for name, source in sources.items() if not len(source)]:
            raise ValueError(f"parts {', '.join(empty)} of the mixture have no samples; leave them out")
        if bucketed := [name for name, source in sources.items() if getattr(source, "bucketed", False)]:
            raise ValueError(
                f"parts {', '.join(bucketed)} of the mixture have packing 'bucketed', whose samples differ in"
                " length; mix windows, by packing 'joined' or 'separate'"
            )
        return MixedSource(sources=tuple(sources.values()), weights=self.stages(), seed=self.seed)

    def heldout(self, folder: Path) -> dict[str, Any] | None:
        """Return name -> held-out samples, for the parts that have some."""
        found = {name: part.heldout(folder) for name, part in self.parts.items()}
        return {name: source for name, source in found.items() if source is not None} or None

    def summary(self, folder: Path) -> str:
        """Return a line for each part, with its proportions and its summary."""
        lines = []
        for number, (name, part) in enumerate(self.parts.items()):
            shares = ", ".join(f"{weights[number] / sum(weights):.1%}" for _, weights in self.stages())
            text = part.summary(folder) if hasattr(part, "summary") else type(part).__name__
            lines.append(f"{shares} {name}: {text}")
        return "\n".join(lines)


def read_weights(text: str, parts: Mapping[str, Any], what: str) -> dict[str, float]:
    """Read the weights of a stage, such as `web 0.7 code 0.3`.

    Raises:
      ValueError: it has another form, an unknown part, or weights out of range.
    """
    words = str(text).split()
    try:
        weights = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    except ValueError:
        raise ValueError(f"{what} has {text!r}; write names and weights, as in 'web 0.7 code 0.3'") from None
    problems = [f"{what} has {near(name, parts)}; name a part" for name in weights if name not in parts]
    problems += [
        f"{what} has {value:g} for {name}; use a number of 0 or more"
        for name, value in weights.items()
        if not (math.isfinite(value) and value >= 0)
    ]
    if not problems and not sum(weights.values()) > 0:
        problems.append(f"{what} are all 0; give one of them more")
    if problems:
        raise ValueError("; ".join(problems))
    return weights
