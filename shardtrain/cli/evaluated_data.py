"""Open the data of `shardtrain evaluate`: text, tokens or conversations, read as in training.

Next: `evaluate.py`, which evaluates it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardtrain.cli.saved_run import SavedRun, choose_tokenizer, find_seq
from shardtrain.data import Chat, Corpus
from shardtrain.data.conversations import COMPLETION, PROMPT
from shardtrain.data.corpus import corpus_files
from shardtrain.data.documents import open_rows, refuse_mixed
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.token_manifest import token_folders, tokenizer_hash
from shardtrain.errors.messages import problems_error
from shardtrain.trainer.evaluation import heldout_text
from shardtrain.trainer.sources import open_sources, token_problems

if TYPE_CHECKING:
    from shardtrain.cli.evaluate import EvaluateOptions

PACKINGS = {"separate": "separate", "bucketed": "separate"}
"""Packing in training -> packing of the text to evaluate on; "joined" for all others."""

OF_CHAT = ("template", "answers", "messages", "too_long", "packing")
"""Options of conversations that are taken from the run."""


def parse_names(given: Sequence[str], name: str) -> dict[str, list[str]]:
    """Parse `NAME=PATH` and `PATH` to name -> paths; a word with = is a path if such a file exists."""
    found: dict[str, list[str]] = {}
    for word in given:
        before, equals, path = word.partition("=")
        is_named = bool(equals) and not Path(word).exists() and "/" not in before
        found.setdefault(before if is_named else name, []).append(path if is_named else word)
    return found


def make_evaluated_sources(saved: SavedRun, options: "EvaluateOptions", folder: Path) -> dict[str, Any]:
    """Return name -> samples of the data to evaluate on.

    Raises:
      ValueError: there are none, the data cannot be read, or it has tokens that the model does not have.
    """
    run = saved.run
    if options.data:
        seq = options.seq or saved.options.get("data.seq") or find_seq(saved)
        data = {
            name: _make_data(saved, options, tuple(map(Path, paths)), seq)
            for name, paths in parse_names(options.data, options.name).items()
        }
        sets = {name: each.train(folder) for name, each in data.items()}
    else:
        sets = {name or options.name: source for name, source in open_sources(run, folder)[1].items()}
        data = dict.fromkeys(sets, run.data)
        if not sets:
            raise ValueError(f"the data of {options.run_file} has no held-out part; give --data PATH")
    vocab = getattr(run.model, "vocab", None)
    problems = [
        problem
        for name, source in sets.items()
        for problem in token_problems({heldout_text(name): source}, vocab, data[name])
    ]
    if problems:
        raise problems_error("the model cannot read this data", problems)
    return sets


def find_tokenizer_name(saved: SavedRun, options: "EvaluateOptions") -> str | None:
    """Return the name of the tokenizer; None if it is unknown, as data of tokens needs none."""
    try:
        return choose_tokenizer(saved, options.tokenizer)
    except ValueError:
        return None


def _make_data(saved: SavedRun, options: "EvaluateOptions", paths: tuple[Path, ...], seq: int) -> Any:
    """Return the data of some paths, read as the run of a decoder, or the data of the run file, reads it.

    Raises:
      ValueError: the data of the run file has no paths.
    """
    changes: dict[str, Any] = {"paths": paths, "seq": seq, "heldout_fraction": 0.0}
    if options.run_file is not None:
        data = saved.run.data
        known = [field.name for field in fields(data)] if is_dataclass(data) else []
        if "paths" not in known:
            raise ValueError(
                f"the data of {options.run_file} is {type(data).__name__}, which reads no paths; leave --data"
                " out to evaluate on its held-out part"
            )
        return replace(cast("Any", data), **{name: value for name, value in changes.items() if name in known})
    files = corpus_files(paths)
    if not refuse_mixed(files):
        changes["tokenizer"] = choose_tokenizer(saved, options.tokenizer)
        of_chat = _chat_options(saved.options)
        if of_chat and _is_chat(files[0], of_chat.get("messages", "messages")):
            return Chat(**changes, **of_chat)
    packing: Any = PACKINGS.get(str(saved.options.get("data.packing")), "joined")
    corpus = Corpus(**changes, text=options.text, packing=packing)
    if "tokenizer" in changes:
        return corpus
    made_by = {each.tokenizer_hash: str(each.folder) for each in token_folders(files)}
    own = find_tokenizer_name(saved, options)
    if own is not None and made_by and (digest := tokenizer_hash(own)) not in made_by:
        raise ValueError(
            f"{next(iter(made_by.values()))} has tokens of another tokenizer than the run's, {own}"
            f" (hash {digest}); tokenize its text with the run's tokenizer"
        )
    return corpus if made_by else replace(corpus, vocab_size=saved.run.model.vocab)


def _chat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run's conversations, also inside a mixture; {} for other data."""
    found = next((name for name in options if name.startswith("data.") and name.endswith(".template")), None)
    prefix = "" if found is None else found.removesuffix("template")
    return {name: options[prefix + name] for name in OF_CHAT if prefix and prefix + name in options}


def _is_chat(file: SourceFile, field: str) -> bool:
    """Return whether the first row of a file is a conversation."""
    try:
        rows: Iterator[Any] = open_rows(file, None).iterate(0, 1)
        _, record = next(rows)
    except (StopIteration, BadData):
        return False
    return isinstance(record, Mapping) and (field in record or {PROMPT, COMPLETION} <= {*record})
