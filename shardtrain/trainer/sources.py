"""Open the samples of a run, those to train on and the held-out sets by name; make batches of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.data import Batches, TokenBatches
from shardtrain.data.samples import load_rows
from shardtrain.errors.messages import problems_error
from shardtrain.errors.user_code import user_code
from shardtrain.trainer.config import Run


def open_sources(run: Run, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the samples to train on, and the held-out sets by name; a single set has the name "".

    Args:
      run: the run.
      folder: its folder, for what the data writes there.

    Raises:
      ValueError: they have no length, or no samples by number; or a held-out set has no usable name.
    """
    with user_code(lambda error: f"the data ({type(run.data).__name__})"):
        train, heldout = run.data.train(folder), run.data.heldout(folder)
    sets = _named_sets(heldout)
    found = {"train(folder)": train}
    found |= {f"heldout(folder){f'[{name!r}]' if name else ''}": source for name, source in sets.items()}
    problems = [
        f"{name} gave a {type(source).__name__}; give something with a length and samples by number"
        " (__len__ and __getitem__), such as the dataset that a loader reads; batches are made of it"
        for name, source in found.items()
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__"))
    ]
    named = [name for name, source in sets.items() if source is not heldout]
    if any(not name or name != name.strip("/") for name in named):
        problems.append(
            f"heldout(folder) gave sets named {', '.join(map(repr, sets))}; each set's loss is logged as"
            " heldout/NAME/loss: give each a name, without / at its ends"
        )
    if problems:
        raise problems_error("the data cannot be read", problems)
    return train, sets


def source_warnings(batches: Batches | TokenBatches, run: Run) -> list[str]:
    """Return what is odd about samples: they change from one reading to the next, or do not fill a batch."""
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

    Held-out batches, which are not shuffled, have workers of their own, which start at each evaluation.

    Raises:
      ValueError: they are counted in tokens, and the source does not know the lengths of its samples, or one
        is longer than a batch; or they are counted in examples, and the source has buckets of lengths.
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


def _named_sets(heldout: Any) -> dict[str, Any]:
    """Return name -> held-out samples; a single source has the name "".

    A dict of samples by number is a single source.
    """
    if heldout is None:
        return {}
    if isinstance(heldout, Mapping) and all(isinstance(name, str) for name in heldout):
        return dict(heldout)
    return {"": heldout}
