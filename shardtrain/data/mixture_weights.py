"""The text of the weights of a mixture. Next: `mixture.py`."""

import math
from collections.abc import Mapping
from typing import Any

from shardtrain.errors.messages import near


def read_weights(text: str, parts: Mapping[str, Any], what: str) -> dict[str, float]:
    """Read the weights of a stage, such as `web 0.7 code 0.3`.

    Raises:
      ValueError: it is something else, names no part, or has weights out of range.
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
