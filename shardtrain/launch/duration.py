"""Format and parse times of Slurm: 01:30:00, 1-12."""

import re

from shardtrain.system.excerpts import short


def clock(seconds: int) -> str:
    """Format seconds as a time of Slurm.

    >>> clock(3600), clock(90061)
    ('01:00:00', '1-01:01:01')
    """
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def parse_time(text: str) -> int:
    """Parse a time of Slurm into seconds: minutes, minutes:seconds, hours:minutes:seconds, days-hours...

    Raises:
      ValueError: the text has none of these forms.

    >>> parse_time("90"), parse_time("01:30:00"), parse_time("1-12"), parse_time("2:30")
    (5400, 5400, 129600, 150)
    """
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip())
    if not match:
        raise ValueError(f"time {short(text)}: write hours:minutes:seconds, 01:30:00, or days-hours, 1-12")
    days, *parts = (int(part) for part in match.groups(default="-1"))
    given = [part for part in parts if part >= 0]
    if days >= 0:
        hours, minutes, seconds = [*given, 0, 0][:3]
    elif len(given) == 3:
        hours, minutes, seconds = given
    else:
        hours, (minutes, seconds) = 0, [*given, 0][:2]
    return max(days, 0) * 86400 + hours * 3600 + minutes * 60 + seconds
