"""Rules by which replicas with local steps decide whether to meet, where the synchronisation lets them.

A new one is a file here and an entry of `MEETING_RULES`; tests/combine/test_meeting.py checks every entry.
Next: `moved.py`.
"""

from collections.abc import Callable

from shardtrain.combine.meeting_rule import MeetingRule
from shardtrain.combine.moved import moved
from shardtrain.errors.messages import near

ALWAYS = "always"

MEETING_RULES: dict[str, Callable[[float], MeetingRule]] = {"moved": moved}
"""Name -> function that makes the rule of its number, which is written after a colon."""


def make_meeting_rule(text: str) -> MeetingRule | None:
    """Make a rule by name; None is "always", which asks nothing.

    Args:
      text: "always", or a name of `MEETING_RULES` with its number, such as "moved:0.01".

    Raises:
      ValueError: there is no such rule, or it cannot use the number.
    """
    if text == ALWAYS:
        return None
    name, _, number = (part.strip() for part in text.partition(":"))
    if name not in MEETING_RULES:
        raise ValueError(f"when is {text!r}: {near(name, [ALWAYS, *MEETING_RULES])}")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"when is {text!r}; write a number after a colon, such as '{name}:0.01'") from None
    return MEETING_RULES[name](value)
