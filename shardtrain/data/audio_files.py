"""Audio with labels as the data of a run: folders of WAV, FLAC or Ogg files; all that imports soundfile.

Next: `resampling.py`, for files of other rates; `image_files.py`, the same for images; `batches.py`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardtrain.data.documents import OnError
from shardtrain.data.resampling import MOST_RATE, resampled, span_of
from shardtrain.data.sources.format import BadData
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error
from shardtrain.system.excerpts import some
from shardtrain.system.untrusted_files import open_regular

SUFFIXES = (".wav", ".flac", ".ogg")


class AudioFile(NamedTuple):
    """A file, the number of its class, its number of windows, and the frames of a second of it."""

    path: Path
    label: int
    num_windows: int
    rate: int


@dataclass(frozen=True, kw_only=True)
class AudioSource:
    """A random-access source of windows of audio files, decoded when they are read.

    Args:
      files: the files.
      window: frames of a sample.
      rate: frames in a second.
      on_error: see `AudioFiles`.
      damaged: files that were left out, each with the reason.
    """

    files: tuple[AudioFile, ...]
    window: int
    rate: int
    on_error: OnError
    damaged: tuple[str, ...]
    skipped_rows: set[tuple[str, int]] = field(default_factory=set, compare=False, repr=False)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.files else 0

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([file.num_windows for file in self.files])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return sample `index`.

        Returns:
          {"audio": float32 (window,), from -1 to 1, the mean of all channels, with zeros behind the end
          of a short file, "label": int32 ()}; with `on_error="skip"` also "weights" float32 (): 0 for a
          window that cannot be read, which is silent.

        Raises:
          IndexError: no such sample.
          BadData: it cannot be read, and `on_error` is "stop".
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, "right"))
        file = self.files[number]
        place = index - int(self._ends[number]) + file.num_windows
        audio, weight = np.zeros(self.window, np.float32), np.float32(1)
        try:
            found = self._decoded(file, place)
            audio[: len(found)] = found
        except BadData:
            if self.on_error == "stop":
                raise
            self.skipped_rows.add((str(file.path), place))
            weight = np.float32(0)
        sample = {"audio": audio, "label": np.int32(file.label)}
        return {**sample, "weights": weight} if self.on_error == "skip" else sample

    def _decoded(self, file: AudioFile, place: int) -> np.ndarray:
        span = span_of(place * self.window, self.window, file.rate, self.rate)
        num_frames = span.stop - span.start
        try:
            found, _ = import_module("soundfile").read(
                file.path, num_frames, start=span.start, dtype="float32", always_2d=True
            )
        except Exception as error:
            raise BadData(file.path, f"its audio cannot be decoded ({error})") from None
        audio = resampled(found.mean(1), span, self.window)
        if file.num_windows > 1 and len(audio) < self.window:
            raise BadData(file.path, f"it was cut off: it ends in window {place:,} of {file.num_windows:,}")
        return audio

    def add_skipped(self, rows: set[tuple[str, int]]) -> None:
        """Count windows that another process has left out."""
        self.skipped_rows.update(rows)

    @property
    def num_skipped(self) -> int | None:
        """How many windows and files this process has left out so far; None: none may be."""
        return len(self.skipped_rows) + len(self.damaged) if self.on_error == "skip" else None

    @property
    def fingerprint(self) -> str:
        """A hash of the names, classes and lengths of all files, and of the options."""
        # files of another rate are other samples; those of one rate have the hash that they always had
        files = [
            (file.path.name, file.label, file.num_windows, *([file.rate] if file.rate != self.rate else []))
            for file in self.files
        ]
        return hashlib.sha256(repr((files, self.window, self.rate)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class AudioFiles:
    """The data of a run: windows of audio files in folders of classes.

    The label of a file is the number of its class's folder, in the order of names. A file is cut into windows
    one after the other; what is left at its end is not used, and a file that is shorter is filled with zeros.

    Args:
      paths: folders, each with one folder for each class.
      window: frames of a sample; a second has `rate` of them.
      rate: frames in a second, of samples and of all files.
      resample: take files of other rates too, and resample them to `rate` when they are read.
      heldout_fraction: fraction of the files, drawn at random once, that is held out of training.
      on_error: what to do with audio that cannot be read: stop, or skip it: a window gets weight 0, so the
        position of all others stays, and is counted, as is a file whose beginning cannot be read.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    paths: tuple[Path, ...] = ()
    window: int
    rate: int = 16_000
    resample: bool = False
    heldout_fraction: float = 0.05
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; use 1 or more"
            for name in ("window", "rate")
            if isinstance(value := getattr(self, name), int) and value < 1
        ]
        if not 0 <= self.heldout_fraction < 1:
            problems.append(f"heldout_fraction is {self.heldout_fraction}; use 0 or more, below 1")
        if problems:
            raise problems_error("this audio cannot be used", problems)

    def train(self, folder: Path) -> AudioSource:
        """Return the windows to train on; nothing is written into `folder`.

        Raises:
          BadData: the beginning of a file cannot be read, or it has another rate, without `resample`.
          ValueError: there are too few files, or soundfile is missing.
        """
        return self._parts()[0]

    def heldout(self, folder: Path) -> AudioSource | None:
        """Return the held-out windows; None if nothing is held out."""
        return self._parts()[1]

    def summary(self, folder: Path) -> str:
        """Return a line with what is read."""
        train, heldout = self._parts()
        text = f"audio: {len(train):,} windows of {len(train.files):,} files to train on"
        text += f", {0 if heldout is None else len(heldout):,} held out"
        return text + (f"; skipped {some(train.damaged, 3)}" if train.damaged else "")

    def _parts(self) -> tuple[AudioSource, AudioSource | None]:
        if find_spec("soundfile") is None:
            raise ValueError(
                "audio is read by the library soundfile: install it with uv sync --extra audio in a clone,"
                " elsewhere with pip install 'path/to/shardtrain[audio]'"
            )
        found = sorted(
            path for each in self.paths for path in each.glob("*/**/*") if path.suffix.lower() in SUFFIXES
        )
        files, damaged = self._opened(found)
        num_heldout = max(1, round(self.heldout_fraction * len(files))) if self.heldout_fraction else 0
        if len(files) <= num_heldout:
            raise ValueError(
                f"there are {len(files)} audio files in {some(self.paths, 3)}, and {num_heldout} are held"
                " out; give a folder with one folder for each class, or another heldout_fraction"
            )
        # at random, as folders are sorted by class; the same ones at each start
        order = np.random.default_rng(0).permutation(len(files))

        def part(numbers: Sequence[int] | np.ndarray) -> AudioSource:
            own = tuple(files[number] for number in sorted(numbers))
            return AudioSource(
                files=own, window=self.window, rate=self.rate, on_error=self.on_error, damaged=damaged
            )

        return part(order[num_heldout:]), part(order[:num_heldout]) if num_heldout else None

    def _opened(self, paths: Sequence[Path]) -> tuple[list[AudioFile], tuple[str, ...]]:
        """Read the headers of files, with the reasons of those that are left out."""
        names = {
            path: next(path.relative_to(each) for each in self.paths if each in path.parents).parts[0]
            for path in paths
        }
        labels = {name: number for number, name in enumerate(sorted(set(names.values())))}
        files: list[AudioFile] = []
        damaged: list[str] = []
        for path in paths:
            try:
                num_frames, rate = self._facts(path)
                num_windows = max(1, num_frames // self.window)
                files.append(AudioFile(path, labels[names[path]], num_windows, rate))
            except BadData as error:
                if self.on_error == "stop":
                    raise
                damaged.append(f"{error.place}: {error.why}")
        return files, tuple(damaged)

    def _facts(self, path: Path) -> tuple[int, int]:
        """Return the frames of a file at the rate of samples, and its own rate."""
        try:
            open_regular(path).close()  # soundfile would wait for a FIFO
            facts = import_module("soundfile").info(path)
        except Exception as error:
            raise BadData(path, f"it is no audio file ({error})") from None
        own = int(facts.samplerate)
        if own != self.rate and not self.resample:
            raise BadData(
                path, f"its rate is {own}, and {self.rate} is asked for; convert it, or use resample=True"
            )
        if own != self.rate and own > MOST_RATE:
            raise BadData(path, f"its rate is {own}, and at most {MOST_RATE} can be resampled; convert it")
        return -(-facts.frames * self.rate // own), own
