"""What happened in a run whose islands came and went: its epochs, its islands, and where the time went.

Times are those of the files of epochs; speeds and seconds of saves are those of the metrics. Next:
`plots/members.py`, which draws it.
"""

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from shardtrain.elastic.epoch import Epoch
from shardtrain.elastic.history import History
from shardtrain.elastic.ledger import find_steps
from shardtrain.report.quantities import duration_text, seconds_text
from shardtrain.report.tables import mesh_line, table_text

GONE = ("left", "excluded", "lost")
"""Words of an epoch before the names of those that are no members any more."""

PRESENT_SECONDS = 15.0
"""An island that showed within this time that it is alive is present."""

OF_STEPS = ("seconds/step", "seconds/input", "seconds/other")
OF_OTHERS = ("seconds/save", "seconds/evaluation")
"""Kinds of work in a line of metrics."""

CAUSES = {
    "fewer": "fewer or slower islands than the most",
    "few": "waiting without a step until an island joined",
    "saves": "saves and evaluations",
    "deaths": "until a death was noticed and the others went on (up to 1 s too much for each)",
    "repeats": "slots of repeated steps that were computed again (estimated)",
    "absent": "no island was there",
    "void": "steps after the last checkpoint that were lost with all islands",
    "rest": "the rest: first steps of islands, slower steps, waits of other kinds",
}


@dataclass(frozen=True, kw_only=True)
class IslandPast:
    """An island of a run; seconds are since the first epoch.

    Args:
      name: its name.
      host: the host that it named, or "".
      mesh: axis -> size, or {}; of each stage, if it is a pipeline of several processes.
      stages: number of its stages, or 1.
      came: when it became a member.
      gone: when it was none any more, or last alive.
      why: left, lost, excluded, present, or ended, of which it is not known whether it stopped or died.
      num_slots: slots that it computed of committed steps.
    """

    name: str
    host: str
    mesh: Mapping[str, int]
    stages: int
    came: float
    gone: float
    why: str
    num_slots: int


@dataclass(frozen=True, kw_only=True)
class EpochPast:
    """An epoch as it went.

    Args:
      epoch: its file.
      began: seconds from the first epoch to it.
      seconds: until the next epoch, or the last sign of life of its members if that is founded anew.
      steps: the steps that it committed.
      share: rows of one of its steps, of those of a step with the most islands.
      step_seconds: of one of its steps, without saves and evaluations.
      other_seconds: of its saves and evaluations.
    """

    epoch: Epoch
    began: float
    seconds: float
    steps: range
    share: float
    step_seconds: float
    other_seconds: float


@dataclass(frozen=True, kw_only=True)
class ElasticPast:
    """What happened in an elastic run.

    Args:
      epochs: its epochs.
      islands: its islands, in the order in which they came.
      wall_seconds: from the first epoch to the last sign of life.
      step_seconds: of a step with the most islands, at most the mean of all; 0 if no step was committed.
      num_plain: number of later steps that were trained without islands that come and go.
      lost_seconds: key of `CAUSES` -> seconds.
    """

    epochs: Sequence[EpochPast]
    islands: Sequence[IslandPast]
    wall_seconds: float
    step_seconds: float
    num_plain: int
    lost_seconds: Mapping[str, float]

    @property
    def num_steps(self) -> int:
        """Number of steps that were committed while islands came and went."""
        return sum(len(each.steps) for each in self.epochs)

    @property
    def useful_seconds(self) -> float:
        """The time that all steps would have taken with the most islands, undisturbed."""
        return sum(len(each.steps) * each.share for each in self.epochs) * self.step_seconds

    @property
    def goodput(self) -> float:
        """The share of the time that all steps would have taken with the most islands, undisturbed."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds else 0.0


def summarize(history: History, lines: Sequence[Mapping[str, float]], now: float) -> ElasticPast:
    """Return what happened.

    Args:
      history: the files of the run.
      lines: lines of its metrics; without them, the speed of a step is that of its whole epoch.
      now: the time, in seconds since 1970.

    Raises:
      ValueError: an epoch is missing.
    """
    epochs = _list_epochs(history, lines)
    done = [each for each in epochs if each.steps]
    most = max((len(each.epoch.members) for each in done), default=0)
    of_most = [each.step_seconds for each in done if len(each.epoch.members) == most] or [0.0]
    whole = sum(x.step_seconds * len(x.steps) for x in done)
    of_all = whole / sum(x.share * len(x.steps) for x in done) if done else 0.0
    # fewer islands are faster where they share a host
    step_seconds = min(statistics.median(of_most), of_all)
    lost = dict.fromkeys(CAUSES, 0.0)
    for each, following in zip_longest(epochs, epochs[1:]):
        for cause, seconds in _find_losses(history, each, following, step_seconds):
            lost[cause] += seconds
    return ElasticPast(
        epochs=epochs,
        islands=_list_islands(history, epochs, now),
        wall_seconds=history.ended - history.made[0],
        step_seconds=step_seconds,
        num_plain=count_committed(history, lines) - epochs[0].epoch.step - sum(len(x.steps) for x in epochs),
        lost_seconds=lost,
    )


def _list_epochs(history: History, lines: Sequence[Mapping[str, float]]) -> list[EpochPast]:
    steps = find_steps(history.epochs, count_committed(history, lines), history.plain)
    seconds = [_find_end(history, index) - made for index, made in enumerate(history.made)]
    of_epochs = _split_lines(_join_exchanges(lines, history.epochs[-1].every), steps)
    measured = [_measure_step(each) for each in of_epochs]
    most = max(
        (len(epoch.names) for epoch, done in zip(history.epochs, steps, strict=True) if done), default=1
    )
    others = [sum(line.get(kind, 0.0) for _, line in each for kind in OF_OTHERS) for each in of_epochs]
    found = []
    for index, epoch in enumerate(history.epochs):
        # a short epoch has the speed of others with as many islands
        others_too = zip(measured, history.epochs, strict=True)
        same = [x for x, other in others_too if x and len(other.names) == len(epoch.names)]
        whole = (seconds[index] - others[index]) / max(len(steps[index]), 1)
        usual = measured[index] or (statistics.median(same) if same else whole)
        found.append(
            EpochPast(
                epoch=epoch,
                began=history.made[index] - history.made[0],
                seconds=seconds[index],
                steps=steps[index],
                share=len(epoch.names) / most if epoch.member_slots else 1.0,
                # where most steps are slow, the median is above the mean
                step_seconds=min(usual, whole) if steps[index] else usual,
                other_seconds=others[index],
            )
        )
    return found


def count_committed(history: History, lines: Sequence[Mapping[str, float]]) -> int:
    """Return the number of steps that a run is known to have committed.

    Args:
      history: the history of the run.
      lines: its lines of metrics.
    """
    # local steps are committed with their exchange
    every = history.epochs[-1].every
    steps = (int(line["step"]) // every * every for line in lines)
    return max([history.saved, history.epochs[-1].step, *steps])


def _find_end(history: History, index: int) -> float:
    """Return when an epoch ended, in seconds since 1970."""
    following = history.epochs[index + 1 :][:1]
    end = history.made[index + 1] if following else history.ended
    if not following or following[0].founded:
        names = history.epochs[index].names
        alive = max((history.alive[name] for name in names if name in history.alive), default=0.0)
        end = min(max(alive, history.made[index]), end)
    return end


Lines = list[tuple[int, Mapping[str, float]]]
"""Lines of metrics, each with the number of steps since the line before; 0 if that is of another epoch."""


def _join_exchanges(lines: Sequence[Mapping[str, float]], every: int) -> list[Mapping[str, float]]:
    """Return a line for each exchange with all its seconds, which its last step has taken."""
    found, spent = [], dict.fromkeys((*OF_STEPS, *OF_OTHERS), 0.0)
    for line in lines:
        spent = {kind: seconds + line.get(kind, 0.0) for kind, seconds in spent.items()}
        if int(line["step"]) % every == 0:
            found.append({**line, **spent})
            spent = dict.fromkeys(spent, 0.0)
    return found


def _split_lines(lines: Sequence[Mapping[str, float]], steps: Sequence[range]) -> list[Lines]:
    """Return the lines of each epoch."""
    found: list[Lines] = [[] for _ in steps]
    # ranges that are not empty follow each other
    begun = [(each.start, index) for index, each in enumerate(steps) if each]
    for before, line in pairwise([{"step": -1}, *lines]):
        place = bisect_left(begun, (line["step"], 0)) - 1
        if place >= 0 and line["step"] <= steps[begun[place][1]].stop:
            start, index = begun[place]
            number = line["step"] - before["step"] if before["step"] >= start else 0
            found[index].append((int(number), line))
    return found


def _measure_step(lines: Lines) -> float | None:
    """Return the median seconds of a step by the lines of an epoch."""
    found = [
        sum(line.get(kind, 0.0) for kind in OF_STEPS) / number
        for number, line in lines
        if number > 0 and OF_STEPS[0] in line
    ]
    return statistics.median(found) if found else None


def _find_losses(
    history: History, each: EpochPast, following: EpochPast | None, step_seconds: float
) -> list[tuple[str, float]]:
    """Return cause -> seconds of an epoch in which no step was committed at the speed of the most islands."""
    done = len(each.steps)
    left = each.seconds - done * each.step_seconds
    found = [("fewer", done * (each.step_seconds - each.share * step_seconds))]

    def take(cause: str, seconds: float) -> None:
        nonlocal left
        taken = min(max(seconds, 0.0), max(left, 0.0))
        found.append((cause, taken))
        left -= taken

    take("saves", each.other_seconds)
    if following is not None and following.epoch.founded:
        found.append(("absent", following.began - each.began - each.seconds))
        take("void", left)
    elif following is not None:
        epoch, made = following.epoch, history.made[following.epoch.number - 1]
        if names := find_names(epoch.why, "lost"):
            take("deaths", made - min(history.alive.get(name, made) for name in names))
        elif not done and find_names(epoch.why, "joined"):
            take("few", left)
        if epoch.repeats:
            part = 1 - sum(epoch.kept) / sum(map(len, epoch.slots))
            take("repeats", epoch.every * each.step_seconds * part)
    return [*found, ("rest", left)]


def _list_islands(history: History, epochs: Sequence[EpochPast], now: float) -> list[IslandPast]:
    names = dict.fromkeys(name for each in epochs for name in each.epoch.names)
    found = []
    for name in names:
        own = [each for each in epochs if name in each.epoch.names]
        after = epochs[own[-1].epoch.number :][:1]
        alive = history.alive.get(name, history.ended)
        words = [word for word in GONE if after and name in find_names(after[0].epoch.why, word)]
        if words:
            gone, why = after[0].began, words[0]
        else:
            gone = min(alive, history.ended) - history.made[0]
            why = "present" if not after and now - alive < PRESENT_SECONDS else "ended"
        slots = 0
        for each in own:
            # the steps until the first exchange are dealt otherwise
            first = each.epoch.find_next(each.epoch.step) - each.epoch.step
            for steps in (each.steps[:first], each.steps[first:]):
                slots += sum(len(each.epoch.slots_of(step)[name]) for step in steps[:1]) * len(steps)
        found.append(
            IslandPast(
                name=name,
                host=str(history.members.get(name, {}).get("host", "")),
                mesh=history.find_mesh(name),
                stages=history.find_count(name, "stages"),
                came=own[0].began,
                gone=gone,
                why=why,
                num_slots=slots,
            )
        )
    return found


def find_names(why: str, word: str) -> list[str]:
    """Return the names that the reason of an epoch has after a word.

    >>> find_names("joined c; lost a, b", "lost")
    ['a', 'b']
    """
    parts = [part.removeprefix(f"{word} ") for part in why.split("; ") if part.startswith(f"{word} ")]
    return [name for part in parts for name in part.split(", ")]


def past_text(past: ElasticPast) -> str:
    """Format what happened: epochs, islands, and where the time went."""
    most = max(len(each.epoch.members) for each in past.epochs)
    repeated = {each.epoch.step: each.epoch.every for each in past.epochs if each.epoch.repeats}
    first, slots = past.epochs[0].epoch, sum(island.num_slots for island in past.islands)
    epochs, islands = [], []
    for each in past.epochs:
        epoch, repeats = each.epoch, each.epoch.every if each.epoch.repeats else ""
        size = len(epoch.members)
        epochs.append([epoch.number, duration_text(each.began), epoch.step, size, repeats, epoch.why])
    for island in past.islands:
        times = duration_text(island.came), duration_text(island.gone)
        share = f"{island.num_slots / max(slots, 1):.1%}"
        mesh = mesh_line(island.mesh) if island.mesh else ""
        mesh += f", {island.stages} stages" if island.stages > 1 else ""
        islands.append([island.name, island.host, mesh, *times, island.why, island.num_slots, share])
    seconds = {"steps, at the speed of the most islands": past.useful_seconds}
    seconds |= {CAUSES[cause]: lost for cause, lost in past.lost_seconds.items() if round(lost, 1)}
    rows = [(name, round(x, 1), f"{x / (past.wall_seconds or 1.0):.1%}") for name, x in seconds.items()]
    of = " for each island" if first.member_slots else ""
    plain = f"; {past.num_plain:,} more steps were trained without --elastic" if past.num_plain else ""
    return (
        f"{past.num_steps:,} steps of {first.num_slots} slots{of} in {duration_text(past.wall_seconds)},"
        f" {sum(repeated.values())} of them repeated; {len(past.islands)} islands, {most} at most at"
        f" once{plain}\n"
        + table_text(["epoch", "after", "first step", "islands", "repeated steps", "why"], epochs)
        + table_text(["island", "host", "mesh", "came", "gone", "why", "slots", "share of rows"], islands)
        + f"goodput {past.goodput:.1%}: a step takes {seconds_text(past.step_seconds)} with the most islands;"
        " the time before the first epoch is not known\n" + table_text(["what", "seconds", "share"], rows)
    )
