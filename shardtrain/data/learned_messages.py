"""Marks by which a message, or a row, says whether it is learned, in files for fine-tuning.

Such as `weight` of OpenAI and Mistral, `train` of Axolotl, `loss` of ms-swift, `masked` of torchtune.
"""

from collections.abc import Mapping
from typing import Any

from shardtrain.system.excerpts import short

LEARNED = {
    *("weight", "lossweight", "lossscale", "loss", "computeloss", "calculateloss", "lossmask"),
    *("train", "training", "trainable", "istrainable", "trainon", "learn", "learned", "learnable"),
}
"""Names of marks that are true for a message that is learned, in lower case without _ and -."""

NOT_LEARNED = {"masked", "ismasked", "maskloss", "ignoreloss", "noloss", "skiploss", "notrain"}
"""Names of marks that are true for a message that is not learned."""

UNCLEAR = {"mask", "traindetail", "trainingdetail", "trainondetail"}
"""Names of marks of which no value is read: what they say differs, or is about parts of a message."""

TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
ASSISTANT = "assistant"


def take_learned(message: dict[str, Any], name: str) -> bool:
    """Remove the marks of a message, and return whether it is learned; without marks answers are.

    Args:
      message: with the role that templates know.
      name: of the message, for errors.

    Raises:
      ValueError: a mark is neither true nor false, marks contradict each other, or a message is marked as
        learned that is no answer.

    >>> take_learned({"role": "assistant", "content": "a", "weight": 0.0}, "messages[0]")
    False
    """
    marks = _marks(message, name)
    said = {f"{key} {short(message.pop(key))}": learned for key, learned in marks.items()}
    is_answer = message["role"] == ASSISTANT
    if said and not is_answer and True in said.values():
        raise ValueError(
            f"{name} has {next(iter(said))} and role {message['role']}, and only messages of the role"
            f" {ASSISTANT} are learned; write 0, or leave it out"
        )
    return is_answer and all(said.values())


def row_learned(record: Mapping[str, Any]) -> bool:
    """Return whether the answers of a row are learned, by marks beside its messages; without marks they are.

    Raises:
      ValueError: a mark is neither true nor false, or marks contradict each other.

    >>> row_learned({"messages": [], "weight": 0}), row_learned({"messages": [], "train": None})
    (False, True)
    """
    return all(_marks(record, "the row").values())


def _marks(fields: Mapping[str, Any], name: str) -> dict[str, bool]:
    """Return whether each mark says that its message or row is learned; None says nothing.

    Raises:
      ValueError: see `row_learned`.
    """
    marks: dict[str, bool] = {}
    for key in fields:
        word = str(key).lower().replace("_", "").replace("-", "")
        if word not in LEARNED | NOT_LEARNED | UNCLEAR or fields[key] is None:
            continue
        value = fields[key]
        flag = TEXTS.get(value.strip().lower()) if isinstance(value, str) else value
        if word in UNCLEAR or not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise ValueError(
                f"{name} has {key} {short(value)}; say whether it is learned by weight 1 or 0, or leave"
                f" {key} out"
            )
        marks[key] = bool(flag) == (word in LEARNED)
    if len(set(marks.values())) > 1:
        said = " and ".join(f"{key} {short(fields[key])}" for key in marks)
        raise ValueError(f"{name} has {said}, which contradict each other; keep one of them")
    return marks
