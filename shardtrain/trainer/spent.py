"""Where the time of a run goes, and what its rank sends: metrics of each line, and the line at the end."""

from collections.abc import Callable, Mapping

from shardtrain.islands.watchdog.activity import ActivityRecord

MOST_RANKS = 16
"""Up to so many ranks have a metric each of the seconds of their own work in a step."""

MOST_BUCKETS = 16
"""The first so many buckets have a metric each of their seconds."""


class Spent:
    """The seconds and bytes of this rank since the last line of metrics, and the seconds of all lines.

    Args:
      activity: the activity record of this process.
      sent: link -> returns the bytes that this process has given to it so far.
      own_seconds: returns rank -> median seconds of its own work in a step; {} where that is not known.
      bucket_seconds: returns bucket -> mean seconds that it took since the last call.

    >>> now, sent = [0.0], [0]
    >>> activity = ActivityRecord(clock=lambda: now[0])
    >>> spent = Spent(activity, {"islands": lambda: sent[0]})
    >>> with activity.at("the step", kind="step"):
    ...     now[0] += 3.0
    >>> now[0], sent[0] = 4.0, 100
    >>> {name: x for name, x in spent().items() if x}
    {'seconds/step': 3.0, 'seconds/other': 1.0, 'bytes/islands': 100}
    >>> spent.summary()
    'time of this start: step 75%, other 25%'
    """

    def __init__(
        self,
        activity: ActivityRecord,
        sent: Mapping[str, Callable[[], int]] = {},
        own_seconds: Callable[[], Mapping[str, float]] = dict,
        bucket_seconds: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        self._activity, self._sent = activity, sent
        self._own_seconds, self._bucket_seconds = own_seconds, bucket_seconds
        self._before: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Forget what was before: a segment of the run begins."""
        self._activity.take_seconds()
        self._bucket_seconds()
        self._before = {link: count() for link, count in self._sent.items()}

    def __call__(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        # every line has the same names
        kinds = ("input", "step", *self._sent, "save", "evaluation", "other")
        seconds = {**dict.fromkeys(kinds, 0.0), **self._activity.take_seconds()}
        for kind, each in seconds.items():
            self._seconds[kind] = self._seconds.get(kind, 0.0) + each
        sent = {link: count() for link, count in self._sent.items()}
        num_bytes = {f"bytes/{link}": count - self._before.get(link, 0) for link, count in sent.items()}
        self._before = sent
        own = self._own_seconds()
        each = {f"own_seconds/{rank}": x for rank, x in own.items()} if len(own) <= MOST_RANKS else {}
        buckets = {
            f"bucket_seconds/{number}": x
            for number, x in self._bucket_seconds().items()
            if number < MOST_BUCKETS
        }
        return {**{f"seconds/{kind}": x for kind, x in seconds.items()}, **num_bytes, **each, **buckets}

    def summary(self) -> str:
        """Return the parts of the time of all lines, the largest first."""
        whole = sum(self._seconds.values()) or 1.0
        parts = sorted(self._seconds.items(), key=lambda item: -item[1])
        shown = [f"{kind} {x / whole:.0%}" for kind, x in parts if x / whole >= 0.005]
        return f"time of this start: {', '.join(shown) or 'nothing was measured'}"
