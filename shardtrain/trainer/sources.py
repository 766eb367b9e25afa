"""Open the samples of a run, make batches of them, identify them, and check their tokens.

Next: `checks/first_batch.py`, which checks batches.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.checks.first_batch import LossFacts, find_class_problems
from shardtrain.data import Batches, TokenBatches
from shardtrain.data.masked import MaskedWindows
from shardtrain.data.mixture import MixedSource
from shardtrain.data.samples import load_rows, load_sample
from shardtrain.data.stream import NO_END
from shardtrain.data.token_range import TokenRange, token_ranges
from shardtrain.errors.messages import refuse
from shardtrain.errors.user_code import user_code
from shardtrain.trainer.config import Run


def open_sources(run: Run, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the samples to train on, and the held-out sets by name; a single set has the name "".

    Args:
      run: the run.
      folder: the folder of the run, where the data may write files.

    Raises:
      ValueError: samples have no length or no numbers; or a held-out set has no usable name.
    """
    with user_code(lambda error: f"the data ({type(run.data).__name__})"):
        train, heldout = run.data.train(folder), run.data.heldout(folder)
    # a dict of samples by number is a single source, whose name is ""
    by_name = isinstance(heldout, Mapping) and all(isinstance(name, str) for name in heldout)
    sets = {} if heldout is None else dict(heldout) if by_name else {"": heldout}
    found = {"train(folder)": train}
    found |= {f"heldout(folder){f'[{name!r}]' if name else ''}": source for name, source in sets.items()}
    problems = [
        f"{name} gave a {type(source).__name__}; give something with a length and samples by number"
        " (__len__ and __getitem__), such as the dataset of a loader; shardtrain makes batches of it"
        for name, source in found.items()
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__"))
    ]
    named = [name for name, source in sets.items() if source is not heldout]
    if any(not name or name != name.strip("/") for name in named):
        problems.append(
            f"heldout(folder) gave sets named {', '.join(map(repr, sets))}; each set's loss is logged as"
            " heldout/NAME/loss: give each a name, without / at its ends"
        )
    refuse("the data cannot be read", problems)
    return train, sets


def find_source_warnings(batches: Batches | TokenBatches, run: Run) -> list[str]:
    """Return warnings about samples that change between two reads, or do not fill a batch."""
    source = batches.source
    found = []
    if run.batch_unit == "examples" and run.batch > len(source):
        found.append(
            f"WARNING: batch is {run.batch}, and the data has {len(source)} samples, so in every batch"
            f" {run.batch - len(source)} rows are padding of weight 0; use --batch {len(source)} or less"
        )
    if getattr(source, "is_stream", False):
        return found
    one, two = (load_rows(source, [0], run.seed) for _ in range(2))
    changed = [name for name in one if one[name].tobytes() != two[name].tobytes()]
    if changed:
        found.append(
            f"WARNING: sample 0 of {type(source).__name__} has other values when it is read again, of"
            f" {', '.join(map(repr, changed))}: a resumed run, and one with other workers, reads other data;"
            " draw in a method augmented(index, epoch, random) of the source, or by"
            " np.random.default_rng((seed, index))"
        )
    return found


def make_batches(
    run: Run, source: Any, *, epochs: int | None = None, shuffle: bool = True
) -> Batches | TokenBatches:
    """Return the batches of a source, counted as the run counts them.

    Held-out batches, which are not shuffled, have their own workers, which start at each evaluation.

    Raises:
      ValueError: batches are counted in tokens, and the source has no lengths of its samples, or one is
        longer than a batch; or they are counted in examples, and the source has buckets of lengths.
    """
    options: dict[str, Any] = {"seed": run.seed, "epochs": epochs, "shuffle": shuffle}
    workers = run.loading.workers if shuffle else run.loading.heldout_workers
    options |= {"prefetch": run.loading.prefetch, "workers": workers}
    if run.batch_unit == "examples" and getattr(source, "bucketed", False):
        raise ValueError(
            f"packing is 'bucketed', whose batches differ in number of documents, and batch is {run.batch}"
            " examples; count tokens, with padding: --batch-unit tokens --batch 8192"
        )
    if run.batch_unit == "examples":
        return Batches(source=source, batch=run.batch, **options)
    if not hasattr(source, "lengths"):
        raise ValueError(
            f"batch_unit is 'tokens', and the data's samples, a {type(source).__name__}, have no `lengths`:"
            " give them that attribute, the number of tokens of each, or use --batch-unit examples"
        )
    return TokenBatches(source=source, batch=run.batch, **options)


def heldout_prefix(name: str) -> str:
    """Return the prefix of a held-out set's metrics.

    >>> heldout_prefix(""), heldout_prefix("code")
    ('heldout/', 'heldout/code/')
    """
    return f"heldout/{name}/" if name else "heldout/"


def heldout_text(name: str) -> str:
    """Return the name of a held-out set in messages.

    >>> heldout_text(""), heldout_text("code")
    ('the held-out data', "the held-out data 'code'")
    """
    return f"the held-out data {name!r}" if name else "the held-out data"


FINGERPRINT, SAMPLES, HELDOUT = "data.fingerprint", "data.samples", "data.heldout"
"""Fields of the description of a run."""


def describe_data(source: Any, heldout: Mapping[str, Any], with_contents: bool) -> dict[str, Any]:
    """Return facts that identify the samples of a run.

    Args:
      source: samples to train on.
      heldout: name -> held-out samples.
      with_contents: digest the first, middle and last sample of held-out sets without a fingerprint.

    >>> describe_data([0] * 10, {"": [0] * 3}, with_contents=False)
    {'data.fingerprint': None, 'data.samples': 10, 'data.heldout': '3 samples'}
    """
    sets = {name: _identity(each, with_contents) for name, each in sorted(heldout.items())}
    fingerprint, number = getattr(source, "fingerprint", None), len(source)
    return {
        FINGERPRINT: fingerprint,
        # without a fingerprint the order depends on it
        SAMPLES: number if fingerprint is None and number < NO_END else None,
        HELDOUT: sets.get("", sets) if len(sets) == 1 else sets,
    }


def is_other_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the samples or their number have changed since a position was saved."""
    # the number of samples was not always saved
    is_other_number = SAMPLES in saved and saved[SAMPLES] != now.get(SAMPLES)
    return saved.get(FINGERPRINT) != now[FINGERPRINT] or is_other_number


def has_other_heldout(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the held-out data has changed, so that its losses cannot be compared."""
    return HELDOUT in saved and saved[HELDOUT] != now.get(HELDOUT)


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


MOST_ROWS = 16
"""Rows of a source without token files that are checked."""


def find_data_problems(run: Run, expected: LossFacts, train: Any, heldout: Mapping[str, Any]) -> list[str]:
    """Return a line for each source of a run with a token or class that the model does not have.

    Args:
      run: the run.
      expected: the facts about its model and loss.
      train: the samples to train on.
      heldout: name -> held-out samples.
    """
    sources = {"the data": train, **{heldout_text(name): source for name, source in heldout.items()}}
    # the number of tokens in the model's vocabulary, if it is known
    of_tokens = {"tokens", "target"} & set(expected.known)
    limit = (expected.num_classes if of_tokens else None) or expected.vocab
    problems = token_problems(sources, limit, run.data)
    parts = train.sources if isinstance(train, MixedSource) else ()
    sources |= {f"source {i} of the mixture": source for i, source in enumerate(parts)}
    for name, source in sources.items():
        # the first batch of the training data has its own check
        if source is train or token_ranges(source) or getattr(source, "is_stream", False):
            continue
        if run.batch_unit == "examples":
            rows = load_rows(source, range(min(len(source), MOST_ROWS)), run.seed)
            problems += [f"{name}: {problem}" for problem in find_class_problems(expected, rows)]
    return problems


def token_problems(sources: Mapping[str, Any], vocab: int | None, data: Any = None) -> list[str]:
    """Return a line for each file with a token outside the vocabulary of the model.

    Args:
      sources: name in messages -> samples.
      vocab: number of tokens in the model's vocabulary; None uses the vocabulary that the data gives.
      data: the data of the run, whose tokenizer may be the cause.
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
    own = tokens.vocab
    with suppress(ValueError, OSError):
        own = own or getattr(data, "vocab", None)
    if isinstance(own, int) and own > vocab:
        return (
            f"{text}; the tokenizer of this data has {own:,} tokens: use the tokenizer of the model, or give"
            f" the model a vocabulary of {own:,}"
        )
    return f"{text}; give it a vocabulary of {token + 1:,} or more, or write the file again"
