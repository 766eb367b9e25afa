"""Multiple-choice questions, answered by the choice that the model finds likeliest after the context.

As the usual evaluation harness: a choice's score is the sum of the log-likelihoods of its tokens, as it is or
divided by the choice's length in bytes.

References:
  Brown et al. 2020 (GPT-3), https://arxiv.org/abs/2005.14165, section 2.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.data.tokenizer import Tokenizer
from shardtrain.errors.messages import problems_error
from shardtrain.system.plain_text import read_lines
from shardtrain.system.untrusted_data import parse_record

SHORTEST = 32
"""Rows are padded to this length, or to twice it, and so on: so there are few programs."""

MOST_PROBLEMS = 8


class Question(NamedTuple):
    """A line of a file of questions.

    Args:
      context: the text before each choice.
      choices: two or more.
      answer: the number of the right one, from 0.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


class Accuracy(NamedTuple):
    """How many questions were answered right.

    Args:
      accuracy: the fraction, by the sums of log-likelihoods.
      accuracy_norm: the fraction, by sums divided by the bytes of each choice.
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
      num_choice: how many of them, at the end, are of the choice.
    """

    tokens: np.ndarray
    num_choice: int


def read_questions(path: Path) -> list[Question]:
    """Read JSON lines of objects with "context", "choices" and "answer", the number of the right choice.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: lists the lines that are no questions; or there are none, or it is not UTF-8.
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


def requests_of(
    questions: Sequence[Question], tokenizer: Tokenizer, delimiter: str, seq: int
) -> list[Request]:
    """Return the tokens of every context with each of its choices, in order.

    Context, delimiter and choice are encoded together; the tokens behind those of the context alone are the
    choice's. Of more than seq + 1 tokens the last are kept. An empty context is the token that separates
    documents.

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
      rows: how many are computed at the same time; short batches are filled up.
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
        found[numbers] = np.asarray(_sums(apply, tokens_BT, weights_BT))[: len(numbers)]
    return found


@jax.jit
def _sums(apply: Any, tokens_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Add up the log-likelihoods of each row's next tokens, those with weight 1."""
    logits = apply(tokens_BT[:, :-1])
    # of a model that computes them in chunks
    logits_BTV = logits.whole() if hasattr(logits, "whole") else logits.astype(jnp.float32)
    # a comparison, so that logits may be sharded over the vocabulary
    classes = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2)
    of_target_BT = jnp.where(classes == tokens_BT[:, 1:, None], logits_BTV, 0).sum(-1)
    return ((of_target_BT - jax.nn.logsumexp(logits_BTV, -1)) * weights_BT).sum(1)


def accuracy_of(questions: Sequence[Question], scores: np.ndarray) -> Accuracy:
    """Return how many questions the likeliest choice answers; of equal ones the first counts.

    Args:
      questions: the questions.
      scores: log-likelihoods of all choices, in order.

    Raises:
      ValueError: a score is not a number.

    >>> questions = [Question("a", ("b", "long"), 1)]
    >>> accuracy_of(questions, np.array([-3.0, -4.0]))
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
