"""`shardtrain evaluate RUN`: evaluate a trained model on held-out data and on multiple-choice questions.

Next: `saved_run.py`, which opens the run; `trainer/evaluation.py`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optax
import tyro

from shardtrain.cli.arguments import list_too_small
from shardtrain.cli.compilation import cache_programs, set_xla_flags
from shardtrain.cli.evaluated_data import find_tokenizer_name, make_evaluated_sources, parse_names
from shardtrain.cli.saved_run import (
    SavedOptions,
    SavedRun,
    choose_tokenizer,
    find_seq,
    open_run,
    round_rows,
)
from shardtrain.data.tokenizer import Bytes, Tokenizer, open_tokenizer
from shardtrain.errors.messages import problems_error
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.metrics import add_metrics, next_token_accuracy
from shardtrain.system import terminal
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.evaluation import (
    Question,
    Request,
    compute_accuracy,
    heldout_prefix,
    log_likelihoods,
    make_evaluation,
    make_requests,
    read_questions,
)
from shardtrain.trainer.setup import RunSetup
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
        if wrong:
            raise problems_error("this cannot be evaluated", wrong)


def main(arguments: Sequence[str]) -> int:
    """Print the values of each data set and file of questions; return 0."""
    flags_text = set_xla_flags(arguments)
    options = tyro.cli(EvaluateOptions, args=list(arguments), prog="shardtrain evaluate")
    options.check()
    with cache_programs(flags_text):
        _print_values(options)
    return 0


def _print_values(options: EvaluateOptions) -> None:
    # mistakes are refused before parameters are read
    questions = {name: read_questions(Path(path)) for name, (path,) in _name_files(options.choices).items()}
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
        restored = saved.restore(evaluated=options.evaluated)
        rows = round_rows(restored, options.batch)
        found = _evaluate(saved, restored, sources, rows, options) if sources else {}
    for name, each in requests.items():
        accuracy = compute_accuracy(
            questions[name], log_likelihoods(restored.apply, each, rows, find_seq(saved))
        )
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
            terminal.out(f"{name}: {', '.join(_format_value(key, value) for key, value in values.items())}\n")


def _make_requests(
    saved: SavedRun, options: EvaluateOptions, questions: Mapping[str, Sequence[Question]]
) -> dict[str, list[Request]]:
    """Return name -> the tokens of each question with each of its choices.

    Raises:
      ValueError: the model does not have one of the tokens.
    """
    tokenizer = open_tokenizer(choose_tokenizer(saved, options.tokenizer))
    vocab = getattr(saved.run.model, "vocab", tokenizer.vocab)
    found = {}
    for name, each in questions.items():
        found[name] = make_requests(each, tokenizer, options.delimiter, find_seq(saved))
        if (largest := max(int(request.tokens.max()) for request in found[name])) >= vocab:
            raise ValueError(
                f"{name} has token {largest:,}, and the model has tokens 0 to {vocab - 1:,}; the tokenizer"
                f" has {tokenizer.vocab:,} tokens: give the model's own: --tokenizer FILE"
            )
    return found


def _format_value(name: str, value: float) -> str:
    return f"{name.replace('_', ' ')} {value:{',' if isinstance(value, int) else '.6g'}}"


def _name_files(given: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> a list of one file; a file without a name is named by its stem.

    Raises:
      ValueError: a name is given twice.
    """
    found: dict[str, list[str]] = {}
    for word in given:
        for name, paths in parse_names([word], Path(word).stem).items():
            if name in found:
                raise ValueError(f"two files of questions are named {name!r}; name them: --choices NAME=FILE")
            found[name] = paths
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
    known = find_tokenizer_name(saved, options)
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
