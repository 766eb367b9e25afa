"""`shardtrain evaluate RUN`: evaluate a trained model on held-out data and on multiple-choice questions.

Next: `saved_run.py`, which opens the run; `trainer/evaluation.py`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import optax
import tyro

from shardtrain.cli.arguments import list_too_small
from shardtrain.cli.checkpoint_path import select_options
from shardtrain.cli.saved_run import SavedOptions, SavedRun, open_run, use_model
from shardtrain.data import Chat, Corpus
from shardtrain.data.conversations import COMPLETION, PROMPT
from shardtrain.data.corpus import corpus_files
from shardtrain.data.documents import open_rows, refuse_mixed
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData
from shardtrain.data.token_manifest import token_folders, tokenizer_hash
from shardtrain.data.tokenizer import Bytes, Tokenizer, open_tokenizer
from shardtrain.errors.messages import refuse
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.metrics import add_metrics, next_token_accuracy
from shardtrain.system import terminal
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.evaluation import (
    Question,
    Request,
    compute_accuracy,
    heldout_prefix,
    heldout_text,
    log_likelihoods,
    make_evaluation,
    make_requests,
    read_questions,
)
from shardtrain.trainer.setup import RunSetup
from shardtrain.trainer.sources import open_sources, token_problems
from shardtrain.trainer.trained_model import RestoredModel

HELDOUT = "heldout"
"""Name of data that is given without one."""

MOST_EXPONENT = 700.0
"""Largest loss whose perplexity is a number."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SavedOptions):
    """Evaluate a trained model on other data or on multiple-choice questions, without changing the run.

    Args:
      data: files, folders or patterns of text or tokens, as in --data of a run, or NAME=PATH. The option may
        be given several times; each name is evaluated separately. By default, the held-out data of
        --run-file.
      choices: a file of JSON lines with "context", "choices" and "answer", the number of the right choice
        from 0, or NAME=FILE. The option may be given several times.
      name: name of data that is given without a name.
      delimiter: text between a context and a choice.
      seq: tokens per window of the data. None means the same as in training.
      text: name of the field with the text, in formats with fields.
      batch: rows of a batch, rounded up so that all devices have the same number.
      batches: largest number of batches of each data set, from its first one on. None means all.
      json: print one JSON object.
    """

    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    choices: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    name: str = HELDOUT
    delimiter: str = " "
    seq: int | None = None
    text: str = "text"
    batch: int = 16
    batches: int | None = None
    json: bool = False

    def check(self) -> None:
        """Refuse options that are out of range or missing, all at once.

        Raises:
          ValueError: lists them.
        """
        wrong = list_too_small({"batch": self.batch, "batches": self.batches, "seq": self.seq})
        if not (self.data or self.choices or self.run_file):
            wrong.append("nothing to evaluate on; give --data PATH, --choices FILE, or both")
        refuse("this cannot be evaluated", wrong)


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


def make_evaluated_sources(saved: SavedRun, options: EvaluateOptions, folder: Path) -> dict[str, Any]:
    """Return name -> samples of the data to evaluate on.

    Raises:
      ValueError: there are none, the data cannot be read, or it has tokens that the model does not have.
    """
    run = saved.run
    if options.data:
        seq = options.seq or saved.options.get("data.seq") or saved.seq
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
    problems: list[str] = []
    for name, source in sets.items():
        problems += token_problems({heldout_text(name): source}, vocab, data[name])
    refuse("the model cannot read this data", problems)
    return sets


def find_tokenizer_name(saved: SavedRun) -> str | None:
    """Return the name of the tokenizer; None if it is unknown, as data of tokens needs none."""
    try:
        return saved.tokenizer
    except ValueError:
        return None


def _make_data(saved: SavedRun, options: EvaluateOptions, paths: tuple[Path, ...], seq: int) -> Any:
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
        changes["tokenizer"] = saved.tokenizer
        # the options of the run's conversations, also inside a mixture
        names = [name for name in saved.options if name.startswith("data.") and name.endswith(".template")]
        own = select_options(saved.options, names[0].removesuffix("template")) if names else {}
        of_chat = {name: own[name] for name in OF_CHAT if name in own}
        if of_chat and _is_chat(files[0], of_chat.get("messages", "messages")):
            return Chat(**changes, **of_chat)
    packing: Any = PACKINGS.get(str(saved.options.get("data.packing")), "joined")
    corpus = Corpus(**changes, text=options.text, packing=packing)
    if "tokenizer" in changes:
        return corpus
    made_by = {each.tokenizer_hash: str(each.folder) for each in token_folders(files)}
    own = find_tokenizer_name(saved)
    if own is not None and made_by and (digest := tokenizer_hash(own)) not in made_by:
        raise ValueError(
            f"{next(iter(made_by.values()))} has tokens of another tokenizer than the run's, {own}"
            f" (hash {digest}); tokenize its text with the run's tokenizer"
        )
    return corpus if made_by else replace(corpus, vocab_size=saved.run.model.vocab)


def _is_chat(file: SourceFile, field: str) -> bool:
    """Return whether the first row of a file is a conversation."""
    try:
        rows: Iterator[Any] = open_rows(file, None).iterate(0, 1)
        _, record = next(rows)
    except (StopIteration, BadData):
        return False
    return isinstance(record, Mapping) and (field in record or {PROMPT, COMPLETION} <= {*record})


def main(arguments: Sequence[str]) -> int:
    """Print the values of each data set and file of questions; return 0."""
    return use_model("evaluate", EvaluateOptions, arguments, _print_values)


def _print_values(options: EvaluateOptions) -> None:
    # mistakes are refused before parameters are read
    questions: dict[str, list[Question]] = {}
    for word in options.choices:
        # a file without a name is named by its stem
        ((name, (path,)),) = parse_names([word], Path(word).stem).items()
        if name in questions:
            raise ValueError(f"two files of questions are named {name!r}; name them: --choices NAME=FILE")
        questions[name] = read_questions(Path(path))
    saved = open_run(options)
    if saved.is_encoder_decoder and (options.data or options.choices or options.run_file is None):
        raise ValueError(
            f"the model of {options.run} is an encoder-decoder, which is evaluated on the held-out"
            " pairs of its run; give only its run file: --run-file my_run.py"
        )
    requests = _make_requests(saved, options, questions) if questions else {}
    with ExitStack() as stack:
        # text is tokenized there, so that the folder of the run stays unchanged
        folder = Path(stack.enter_context(TemporaryDirectory()))
        sources = {}
        if options.data or not options.choices:
            sources = make_evaluated_sources(saved, options, folder)
        restored = saved.restore()
        rows = restored.round_rows(options.batch)
        found = _evaluate(saved, restored, sources, rows, options) if sources else {}
    for name, each in requests.items():
        accuracy = compute_accuracy(questions[name], log_likelihoods(restored.apply, each, rows, saved.seq))
        found[name] = {**found.get(name, {}), **accuracy._asdict()}
    if wrong := [f"{key} of {name}" for name, of in found.items() for key, x in of.items() if math.isnan(x)]:
        raise ValueError(
            f"{', '.join(wrong)} is not a number (NaN); look for inputs that the metric cannot take"
        )
    if options.json:
        about = {"run": str(saved.folder), "step": saved.reader.step, "results": found}
        terminal.out(json.dumps(about) + "\n")
    else:
        for name, values in found.items():
            shown = [
                f"{key.replace('_', ' ')} {value:{',' if isinstance(value, int) else '.6g'}}"
                for key, value in values.items()
            ]
            terminal.out(f"{name}: {', '.join(shown)}\n")


def _make_requests(
    saved: SavedRun, options: EvaluateOptions, questions: Mapping[str, Sequence[Question]]
) -> dict[str, list[Request]]:
    """Return name -> the tokens of each question with each of its choices.

    Raises:
      ValueError: the model does not have one of the tokens.
    """
    tokenizer = open_tokenizer(saved.tokenizer)
    vocab = getattr(saved.run.model, "vocab", tokenizer.vocab)
    found = {}
    for name, each in questions.items():
        found[name] = make_requests(each, tokenizer, options.delimiter, saved.seq)
        if (largest := max(int(request.tokens.max()) for request in found[name])) >= vocab:
            raise ValueError(
                f"{name} has token {largest:,}, and the model has tokens 0 to {vocab - 1:,}; the tokenizer"
                f" has {tokenizer.vocab:,} tokens: give the model's own: --tokenizer FILE"
            )
    return found


def _evaluate(
    saved: SavedRun,
    restored: RestoredModel,
    sources: Mapping[str, Any],
    rows: int,
    options: EvaluateOptions,
) -> dict[str, dict[str, float]]:
    """Return name -> values, computed by the evaluation that training uses."""
    run = replace(
        saved.run, batch=rows, batch_unit="examples", evaluate_batches=options.batches, evaluate_with=None
    )
    if saved.is_decoder and options.run_file is None:
        run = replace(run, loss=add_metrics(next_token_loss, accuracy=next_token_accuracy))
    placement = restored.placement
    setup = RunSetup(restored.model, optax.identity(), None, placement.mesh, placement)
    means = make_evaluation(run, setup, Coordination(), sources, None)(restored.state)
    known = find_tokenizer_name(saved)
    tokenizer = None if known is None else open_tokenizer(known)
    found = {}
    for name, source in sources.items():
        prefix = heldout_prefix(name)
        values = {key.removeprefix(prefix): value for key, value in means.items() if key.startswith(prefix)}
        if saved.is_decoder:
            values["perplexity"] = math.exp(min(values["loss"], MOST_EXPONENT))
            num_rows = len(source) if options.batches is None else min(len(source), options.batches * rows)
            num_tokens, num_bytes = count_tokens(source, num_rows, tokenizer)
            if num_bytes:
                values["bits_per_byte"] = values["loss"] * num_tokens / num_bytes / math.log(2)
            values["tokens"] = num_tokens
        found[name] = values
    return found


def count_tokens(source: Any, num_rows: int, tokenizer: Tokenizer | None) -> tuple[int, int]:
    """Count the next tokens of windows with non-zero weight, and the bytes of their text without separators.

    Args:
      source: samples with "tokens" (seq + 1,) and, optionally, "weights" (seq,).
      num_rows: number of samples to count, from the first on.
      tokenizer: decodes tokens. None means that the bytes are unknown, and returns 0 for them.
    """
    num_tokens = num_bytes = 0
    document: list[int] = []
    for sample in map(source.__getitem__, range(num_rows)):
        targets = sample["tokens"][1:]
        targets = targets[sample["weights"] != 0] if "weights" in sample else targets
        num_tokens += len(targets)
        if tokenizer is None:
            continue
        # whole documents are decoded, as a character may have several tokens
        document += targets.tolist()
        while tokenizer.separator in document:
            end = document.index(tokenizer.separator)
            num_bytes += _num_bytes(document[:end], tokenizer)
            del document[: end + 1]
    return num_tokens, num_bytes + (0 if tokenizer is None else _num_bytes(document, tokenizer))


def _num_bytes(tokens: list[int], tokenizer: Tokenizer) -> int:
    # a character may be cut at the ends
    return len(tokens) if isinstance(tokenizer, Bytes) else len(tokenizer.decode(tokens).encode())
