"""Checks of all data before the first step: its tokens are in the model's vocabulary.

Next: `first_batch.py`, which checks batches; `prepared_run.py` and `shardtrain evaluate`, which call this.
"""

from collections.abc import Mapping
from typing import Any

from shardtrain.data.masked import MaskedWindows
from shardtrain.data.mixture import MixedSource
from shardtrain.data.samples import load_rows
from shardtrain.data.token_range import TokenRange, token_ranges
from shardtrain.trainer.config import Run
from shardtrain.trainer.evaluation import heldout_text
from shardtrain.trainer.first_batch import Expected, class_problems

MOST_ROWS = 16
"""Rows of a source without token files that are checked."""


def data_problems(run: Run, expected: Expected, train: Any, heldout: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the data of a run beyond its first batch.

    Args:
      run: the run.
      expected: the facts about its model and loss.
      train: the samples to train on.
      heldout: name -> held-out samples.

    Returns:
      A line for each source with a token or class that the model does not have.
    """
    sources = {"the data": train, **{heldout_text(name): source for name, source in heldout.items()}}
    problems = token_problems(sources, token_limit(expected), run.data)
    parts = train.sources if isinstance(train, MixedSource) else ()
    sources |= {f"source {i} of the mixture": source for i, source in enumerate(parts)}
    for name, source in sources.items():
        # the first batch of the data is checked by itself
        if source is train or token_ranges(source) or getattr(source, "is_stream", False):
            continue
        if run.batch_unit == "examples":
            rows = load_rows(source, range(min(len(source), MOST_ROWS)), run.seed)
            problems += [f"{name}: {problem}" for problem in class_problems(expected, rows)]
    return problems


def token_limit(expected: Expected) -> int | None:
    """Return the number of tokens that the model has; None if it is not known."""
    of_tokens = {"tokens", "target"} & set(expected.known)
    return (expected.num_classes if of_tokens else None) or expected.vocab


def token_problems(sources: Mapping[str, Any], vocab: int | None, data: Any = None) -> list[str]:
    """Return a line for each file of tokens, of which one is beyond the vocabulary of the model.

    Args:
      sources: what messages call it -> samples.
      vocab: number of tokens in the model's vocabulary; None: those that the data itself says are allowed.
      data: the data of the run, whose tokenizer may be the reason.
    """
    problems = []
    for name, source in sources.items():
        drawn = source.windows.vocab if isinstance(source, MaskedWindows) else 0
        if vocab is not None and drawn > vocab:
            problems.append(
                f"{name} replaces some masked tokens by random ones below {drawn:,}, its vocabulary, and the"
                f" model has tokens 0 to {vocab - 1:,}; give both the same vocabulary"
            )
            continue
        for tokens in token_ranges(source):
            limits = [limit for limit in (vocab, tokens.vocab) if limit is not None]
            if limits and (found := tokens.first_outside(min(limits))) is not None:
                problems.append(f"{name}: {_outside_text(*found, tokens, vocab, data)}")
    return problems


def _outside_text(token: int, place: str, tokens: TokenRange, vocab: int | None, data: Any) -> str:
    """Return the message about a token, with what to change."""
    if token < 0:
        return f"{place}, is {token}, and tokens are numbers from 0; write the file again"
    if vocab is None or token < vocab:
        return (
            f"{place}, is {token:,}, and the vocabulary that the data gives is {tokens.vocab:,}; set it to"
            f" {token + 1:,} or more"
        )
    text = f"{place}, is {token:,}, and the model has tokens 0 to {vocab - 1:,}"
    own = tokens.vocab or _vocab_of(data)
    if own is not None and own > vocab:
        return (
            f"{text}; the tokenizer of this data has {own:,} tokens: make tokens by that of the model, or"
            f" give the model a vocabulary of {own:,}"
        )
    return f"{text}; give it a vocabulary of {token + 1:,} or more, or write the file again"


def _vocab_of(data: Any) -> int | None:
    try:
        found = getattr(data, "vocab", None)
    except (ValueError, OSError):
        return None
    return found if isinstance(found, int) else None
