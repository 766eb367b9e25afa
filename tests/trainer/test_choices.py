"""Multiple-choice questions: tokens, sums of log-likelihoods and accuracies, against a loop by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.data.tokenizer import Bytes
from shardtrain.trainer.evaluation import (
    Question,
    compute_accuracy,
    log_likelihoods,
    make_requests,
    read_questions,
)

QUESTIONS = [
    Question("The sky is", ("blue", "made of many small stones", "red"), 0),
    Question("", ("yes", "no"), 1),
    Question("Two and two are ", ("five", "4"), 1),
]
TABLE = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)


def apply(tokens, xp=jnp):
    """Logits that depend on the last token and on the one before."""
    before = xp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return xp.asarray(TABLE)[tokens] + 0.5 * xp.asarray(TABLE)[before]


def by_hand(question, seq):
    """The log-likelihood of each choice, one at a time, without padding."""
    found = []
    for choice in question.choices:
        context, text = question.context.encode(), f"{question.context} {choice}".encode()
        num_choice = len(text) - len(question.context.rstrip().encode())
        tokens = list(text if context else b"\0" + text)[-(seq + 1) :]
        logits = apply(np.array([tokens[:-1]]), np)[0].astype(np.float64)
        likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        steps = [likelihoods[i, token] for i, token in enumerate(tokens[1:])]
        found.append(sum(steps[-num_choice:]))
    return found


@pytest.mark.parametrize(("seq", "rows"), [(64, 16), (12, 2)])
def test_scores_and_accuracies_are_those_of_a_loop_by_hand(seq, rows):
    requests = make_requests(QUESTIONS, Bytes(), " ", seq)
    scores = log_likelihoods(jax.tree_util.Partial(apply), requests, rows, seq)
    expected = [by_hand(question, seq) for question in QUESTIONS]
    np.testing.assert_allclose(scores, np.concatenate(expected), rtol=1e-5)
    right = [np.argmax(own) == q.answer for own, q in zip(expected, QUESTIONS, strict=True)]
    lengths = [[len(choice) for choice in question.choices] for question in QUESTIONS]
    norm = [
        np.argmax(np.array(own) / length) == q.answer
        for own, length, q in zip(expected, lengths, QUESTIONS, strict=True)
    ]
    assert compute_accuracy(QUESTIONS, scores) == (np.mean(right), np.mean(norm), 3)


def test_tokens_of_a_choice_are_those_behind_the_context():
    first, _, _, empty, _, spaced, _ = make_requests(QUESTIONS, Bytes(), " ", 64)
    assert (bytes(first.tokens.tolist()), first.num_choice) == (b"The sky is blue", 5)
    # an empty context is the separator, and spaces behind a context belong to the choice
    assert (bytes(empty.tokens.tolist()), empty.num_choice) == (b"\0 yes", 4)
    assert (bytes(spaced.tokens.tolist()), spaced.num_choice) == (b"Two and two are  five", 6)
    (cut, *_) = make_requests(QUESTIONS, Bytes(), "", 7)
    assert (bytes(cut.tokens.tolist()), cut.num_choice) == (b"ky isblue"[-8:], 4)


def test_length_matters_in_bytes():
    questions = [Question("a", ("é", "bb", "c"), 0)]
    assert compute_accuracy(questions, np.array([-4.0, -4.5, -2.1])) == (0.0, 1.0, 1)
    with pytest.raises(ValueError, match=r"no number \(NaN\) for 1 of 3 choices"):
        compute_accuracy(questions, np.array([-4.0, np.nan, -2.1]))


def test_reads_questions_and_lists_lines_that_are_none(tmp_path):
    path = tmp_path / "questions.jsonl"
    good = {"context": "a", "choices": ["b", "c"], "answer": 1, "subject": "letters"}
    path.write_text(json.dumps(good) + "\n\n")
    assert read_questions(path) == [Question("a", ("b", "c"), 1)]
    bad = [
        [],
        {**good, "context": None},
        {**good, "choices": ["b"]},
        {**good, "choices": ["b", ""]},
        {**good, "answer": 2},
        {**good, "answer": True},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in bad) + "{\n" + "[]\n" * 5)
    with pytest.raises(ValueError, match="no questions") as error:
        read_questions(path)
    lines = str(error.value).splitlines()
    assert lines[:7] == [
        f"{path} has lines that are no questions:",
        "  - line 1: it is a list; write an object",
        '  - line 2: "context" is None; give a text',
        "  - line 3: \"choices\" is ['b']; give a list of two texts or more, none empty",
        "  - line 4: \"choices\" is ['b', '']; give a list of two texts or more, none empty",
        '  - line 5: "answer" is 2; give the number of the right choice, from 0 to 1',
        '  - line 6: "answer" is True; give the number of the right choice, from 0 to 1',
    ]
    assert lines[-1] == "  - and 4 more"
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no questions"):
        read_questions(path)
