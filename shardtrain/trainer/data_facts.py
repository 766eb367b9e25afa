"""What identifies the data of a run: saved in checkpoints, and the same on all islands. Next: `resume.py`."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardtrain.data.samples import load_sample
from shardtrain.data.stream import NO_END

FINGERPRINT, SAMPLES, HELDOUT = "data.fingerprint", "data.samples", "data.heldout"
"""Fields of the description of a run."""


def data_facts(source: Any, heldout: Mapping[str, Any], with_contents: bool) -> dict[str, Any]:
    """Return what identifies the samples of a run.

    Args:
      source: samples to train on.
      heldout: name -> samples held out.
      with_contents: whether the first, middle and last of the held-out samples are read, where these have no
        fingerprint: steps are compared by their losses.

    >>> data_facts([0] * 10, {"": [0] * 3}, with_contents=False)
    {'data.fingerprint': None, 'data.samples': 10, 'data.heldout': '3 samples'}
    """
    sets = {name: _identity(each, with_contents) for name, each in sorted(heldout.items())}
    return {
        FINGERPRINT: getattr(source, "fingerprint", None),
        SAMPLES: _num_samples(source),
        HELDOUT: sets.get("", sets) if len(sets) == 1 else sets,
    }


def is_other_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a saved position is of other samples, or of other numbers of the same."""
    # the number of samples was not always saved
    return saved.get(FINGERPRINT) != now[FINGERPRINT] or saved.get(SAMPLES, now[SAMPLES]) != now[SAMPLES]


def has_other_heldout(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether losses of held-out data cannot be compared with those before."""
    return HELDOUT in saved and saved[HELDOUT] != now[HELDOUT]


def _num_samples(source: Any) -> int | None:
    """Return the number of samples of a source without a fingerprint, which an order depends on."""
    if getattr(source, "fingerprint", None) is not None or len(source) >= NO_END:
        return None
    return len(source)


def _identity(source: Any, with_contents: bool) -> str:
    if (found := getattr(source, "fingerprint", None)) is not None:
        return str(found)
    number = len(source)
    if number >= NO_END:
        return "a stream"
    text = f"{number} samples"
    if not with_contents:
        return text
    indices = sorted({0, number // 2, number - 1} - {-1})
    first, again = (_digest(source, indices) for _ in range(2))
    # samples that are drawn at random have no contents to compare
    return f"{text}, {first}" if first == again else text


def _digest(source: Any, indices: list[int]) -> str:
    digest = hashlib.sha256()
    for index in indices:
        sample = load_sample(source, index)
        for name in sorted(sample):
            array = np.asarray(sample[name])
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]
