"""Evaluate held-out data: the loss and its metrics over all islands, and the accuracy of multiple choice.

A metric is logged as `heldout/NAME`, or as `heldout/SET/NAME` for a held-out set with a name. Next:
`train_step/step.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.data import Batch, Loader, Position
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.errors.messages import problems_error
from shardtrain.optim.optimizer_state import find_evaluated_params
from shardtrain.report.metrics import Mean
from shardtrain.system.plain_text import read_lines
from shardtrain.system.untrusted_data import parse_record
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State, copy_to_device
from shardtrain.train_step.step import make_evaluate
from shardtrain.train_step.sync.island_step import IslandStep
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.row_shares import RowShares
from shardtrain.trainer.setup import FIRST_POSITION, RunSetup
from shardtrain.trainer.sources import heldout_prefix, heldout_text, make_batches

Evaluate = Callable[[State], dict[str, float]]
"""state -> held-out values by name."""


def round_evaluation_interval(run: Run) -> int | None:
    """Return the evaluation interval, rounded up to the synchronisation interval."""
    local_steps = run.strategy.synchronisation.every
    return run.evaluate_every and -(-run.evaluate_every // local_steps) * local_steps


def make_evaluation(
    run: Run,
    setup: RunSetup,
    coordination: Coordination,
    heldout: Mapping[str, Any],
    island_step: IslandStep | None,
    share_limits: Sequence[int] | None = None,
    explain: Callable[[Batch], Sequence[str]] | None = None,
) -> Evaluate:
    """Make the function that evaluates a state on held-out data.

    Args:
      run: the run, with the number of batches and the parameters to evaluate.
      setup: the setup of this island.
      coordination: the exchange with the other islands.
      heldout: name of a held-out set ("" for a single one) -> samples by number; {} without held-out data.
      island_step: the step of several islands; None for a run of one island.
      share_limits: the largest part of a batch for each island, as in training; None takes those of the run.
      explain: batch on the host -> why its loss is not a number; None disables it.

    Returns:
      state -> held-out values by name; {} without held-out data. All islands call it at the same time. It
      raises a ValueError if nothing in a set counts or its loss is not a number.
    """
    if not heldout:
        return lambda state: {}
    compute = None if island_step is None else island_step.compute
    in_stages = isinstance(compute, StageCompute)
    evaluate = compute.evaluate if in_stages else make_evaluate(setup.model, run.loss, setup.placement)
    # a pipeline needs microbatches to keep more than one stage busy
    microbatches = run.strategy.accumulate if in_stages or setup.placement.stages else 1
    # rows are split as in training; the held-out data is read once, in its own order
    of_sets = {name: make_batches(run, source, epochs=1, shuffle=False) for name, source in heldout.items()}
    row_counts = sorted({count for batches in of_sets.values() for count in batches.row_counts})
    shares = RowShares(coordination, row_counts, run, setup.mesh, microbatches)
    if share_limits is not None:
        shares.limit(share_limits)
    loaders = {heldout_prefix(name): shares.loader(batches) for name, batches in of_sets.items()}
    select = make_select_params(run, setup)

    def values(state: State) -> dict[str, float]:
        state = state._replace(params=select(state))
        if coordination.transfer is not None or run.elastic.islands:
            # the program of an evaluation has no state of the exchange with other islands
            state = state._replace(combine_state=(), local=(), outer_state=())
        # start all batches of all sets before waiting for the first result
        started = {
            prefix: _start_batches(partial(evaluate, state), loader, run.evaluate_batches)
            for prefix, loader in loaders.items()
        }
        metrics = jax.device_get({prefix: [x for x, _ in each] for prefix, each in started.items()})
        # islands add up sums and counts, which gives the mean over all rows
        sums = {
            f"{prefix}{name}": (mean.sum, mean.count)
            for prefix, of_batches in metrics.items()
            for name, mean in _merge(of_batches).items()
        }
        sums = coordination.sum_over_islands("evaluation", sums)
        means = {name: Mean(sum=total, count=count) for name, (total, count) in sums.items()}
        for name, prefix in zip(heldout, loaders, strict=True):
            loss = means.get(f"{prefix}loss", Mean()).value
            if loss is None:
                raise ValueError(
                    f"{heldout_text(name)} has no loss: every weight in its first {len(metrics[prefix])}"
                    " batches is 0; give data with rows or tokens that count, evaluate more batches, or hold"
                    " nothing out"
                )
            if math.isnan(loss):
                bad = [i for i, x in enumerate(metrics[prefix]) if math.isnan(x["loss_sum"])]
                first = started[prefix][bad[0]][1] if bad else None
                why = explain(loaders[prefix].batches.load(first)) if first and explain else []
                raise ValueError(nan_loss_text(name, bad, len(metrics[prefix]), why))
        return {name: mean.value for name, mean in means.items() if mean.value is not None}

    return values


def _start_batches(
    evaluate: Callable[..., Any], loader: Loader, most: int | None
) -> list[tuple[Any, Position]]:
    """Start to evaluate the first batches of a set; return (metrics, position in the data) of each."""
    found, position = [], None
    with closing(loader.iterate()) as placed:
        for number, (batch, after) in enumerate(islice(placed, most)):
            metrics = evaluate(batch, number, loader.shard(position).start)
            found.append((metrics, position or FIRST_POSITION))
            position = after
    return found


def nan_loss_text(name: str, bad: Sequence[int], num_batches: int, why: Sequence[str]) -> str:
    """Return the message about a held-out set whose loss is NaN.

    Args:
      name: name of the set.
      bad: numbers of the batches of this process whose loss is NaN.
      num_batches: number of batches that it has evaluated.
      why: the problems of the first of them.
    """
    where = (
        f"in {len(bad)} of {num_batches} batches, the first of them number {bad[0]}" if bad else "elsewhere"
    )
    text = "; ".join(why) or (
        "its tokens and labels are in the model's range, so the model computes NaN: look for NaN in the"
        " inputs, for parameters that are too large, or for a compute dtype of too little range"
    )
    return f"{heldout_text(name)} has a loss that is not a number (NaN), {where}: {text}"


def _merge(of_batches: Sequence[Mapping[str, Any]]) -> dict[str, Mean]:
    """Merge the sums and counts of batches by name."""
    means: dict[str, Mean] = {}
    for metrics in of_batches:
        pairs = {"loss": (metrics["loss_sum"], metrics["count"])}
        pairs |= {name: pair for name, pair in metrics.items() if name not in ("loss_sum", "count")}
        for name, (total, count) in pairs.items():
            means[name] = means.get(name, Mean()) + Mean(sum=float(total), count=float(count))
    return means


def make_select_params(run: Run, setup: RunSetup) -> Callable[[State], Any]:
    """Make the function that returns the parameters to evaluate, see `Run.evaluate_with`.

    They have the shardings of the trained parameters.
    """
    if run.evaluate_with is None:
        return lambda state: state.params
    stored = setup.placement.state.opt_state
    select = jax.jit(
        lambda opt_state, params: find_evaluated_params(
            run.evaluate_with, copy_to_device(opt_state, stored), params
        ),
        out_shardings=setup.placement.state.params,
    )
    return lambda state: select(state.opt_state, state.params)


SHORTEST = 32
"""Rows are padded to this length times a power of 2, so that few programs are compiled."""

MOST_PROBLEMS = 8


class Question(NamedTuple):
    """A question with choices.

    Args:
      context: the text before each choice.
      choices: two or more texts.
      answer: the number of the right choice, from 0.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


class Accuracy(NamedTuple):
    """The fraction of questions that were answered right.

    Args:
      accuracy: the fraction by sums of log-likelihoods.
      accuracy_norm: the fraction by these sums divided by the bytes of each choice.
      num_questions: number of questions.
    """

    accuracy: float
    accuracy_norm: float
    num_questions: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """The tokens of a context with one choice.

    Args:
      tokens: int (length,).
      num_choice: number of tokens at the end that belong to the choice.
    """

    tokens: np.ndarray
    num_choice: int


def read_questions(path: Path) -> list[Question]:
    """Read JSON lines of objects with "context", "choices" and "answer", the number of the right choice.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: lists the lines that are no questions; or the file has no questions, or is not UTF-8.
    """
    found, problems = [], []
    for number, line in read_lines(path):
        try:
            found.append(_question(parse_record(line)))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        raise problems_error(f"{path} has lines that are no questions", [*problems[:MOST_PROBLEMS], *more])
    if not found:
        raise ValueError(f'{path} has no questions; write {{"context": ..., "choices": [...], "answer": 0}}')
    return found


def _question(value: Any) -> Question:
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}; write an object")
    context, choices, answer = (value.get(name) for name in ("context", "choices", "answer"))
    if not isinstance(context, str):
        raise ValueError(f'"context" is {context!r}; give a text')
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(c and isinstance(c, str) for c in choices)
    ):
        raise ValueError(f'"choices" is {choices!r}; give a list of two texts or more, none empty')
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f'"answer" is {answer!r}; give the number of the right choice, from 0 to {len(choices) - 1}'
        )
    return Question(context, tuple(choices), answer)


def make_requests(
    questions: Sequence[Question], tokenizer: Tokenizer, delimiter: str, seq: int
) -> list[Request]:
    """Return the tokens of every context with each of its choices, in order.

    Context, delimiter and choice are encoded together; the tokens after the context belong to the choice.
    Only the last seq + 1 tokens are kept. An empty context is the token that separates documents.

    Raises:
      ValueError: a choice has no tokens of its own.
    """
    contexts, texts = [], []
    for question in questions:
        # spaces at the end of a context belong to the choice, as tokenizers join them with what follows
        context = question.context.rstrip()
        between = question.context[len(context) :] + delimiter
        for choice in question.choices:
            contexts.append(context)
            texts.append(context + between + choice)
    before, whole = tokenizer.encode(contexts), tokenizer.encode(texts)
    found = []
    for text, start, tokens in zip(texts, before, whole, strict=True):
        num_choice = len(tokens) - len(start)
        if num_choice < 1:
            raise ValueError(f"the choice at the end of {text[-80:]!r} has no tokens; give another one")
        if not len(start):
            tokens = np.concatenate([[tokenizer.separator], tokens])
        tokens = tokens[-(seq + 1) :].astype(np.int32)
        found.append(Request(tokens=tokens, num_choice=min(num_choice, len(tokens) - 1)))
    return found


def log_likelihoods(apply: Any, requests: Sequence[Request], rows: int, seq: int) -> np.ndarray:
    """Return the sum of the log-likelihoods of each choice's tokens, float32 (requests,).

    Args:
      apply: tokens int32 (B, T) -> logits (B, T, V); a pytree, such as `jax.tree_util.Partial`.
      requests: the tokens.
      rows: number of rows in a batch; short batches are padded.
      seq: positions of the model.
    """
    found = np.zeros(len(requests), np.float32)
    # neighbours in length share a batch
    order = sorted(range(len(requests)), key=lambda number: len(requests[number].tokens))
    for start in range(0, len(order), rows):
        numbers = order[start : start + rows]
        longest = len(requests[numbers[-1]].tokens) - 1
        width = SHORTEST
        while width < longest:
            width *= 2
        width = min(width, seq)
        tokens_BT = np.zeros((rows, width + 1), np.int32)
        weights_BT = np.zeros((rows, width), np.float32)
        for row, number in enumerate(numbers):
            tokens, num_choice = requests[number].tokens, requests[number].num_choice
            tokens_BT[row, : len(tokens)] = tokens
            weights_BT[row, len(tokens) - 1 - num_choice : len(tokens) - 1] = 1
        found[numbers] = np.asarray(_sum_log_likelihoods(apply, tokens_BT, weights_BT))[: len(numbers)]
    return found


@jax.jit
def _sum_log_likelihoods(apply: Any, tokens_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Add up the log-likelihoods of each row's next tokens, those with weight 1."""
    logits = apply(tokens_BT[:, :-1])
    # a model may compute logits in chunks
    logits_BTV = logits.whole() if hasattr(logits, "whole") else logits.astype(jnp.float32)
    # a comparison, so that logits may be sharded over the vocabulary
    classes = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2)
    of_target_BT = jnp.where(classes == tokens_BT[:, 1:, None], logits_BTV, 0).sum(-1)
    return ((of_target_BT - jax.nn.logsumexp(logits_BTV, -1)) * weights_BT).sum(1)


def compute_accuracy(questions: Sequence[Question], scores: np.ndarray) -> Accuracy:
    """Compute the fraction of questions whose likeliest choice, the first of equal ones, is right.

    Args:
      questions: the questions.
      scores: log-likelihoods of all choices, in order.

    Raises:
      ValueError: a score is not a number.

    >>> questions = [Question("a", ("b", "long"), 1)]
    >>> compute_accuracy(questions, np.array([-3.0, -4.0]))
    Accuracy(accuracy=0.0, accuracy_norm=1.0, num_questions=1)
    """
    if num_bad := int(np.isnan(scores).sum()):
        raise ValueError(
            f"the model gives no number (NaN) for {num_bad:,} of {len(scores):,} choices, so they have no"
            " order; evaluate an earlier step: --step N"
        )
    right = right_norm = start = 0
    for question in questions:
        own = scores[start : (start := start + len(question.choices))]
        num_bytes = np.array([len(choice.encode()) for choice in question.choices])
        right += int(own.argmax() == question.answer)
        right_norm += int((own / num_bytes).argmax() == question.answer)
    return Accuracy(right / len(questions), right_norm / len(questions), len(questions))
