"""Write the run file that trains an imported model further."""

from typing import Any, Literal

from shardtrain.imported import MODEL_FILE

RUN_FILE = "run.py"

TrainedOn = Literal["tokens", "masked tokens", "images", "pairs"]


def find_training_kind(config: Any) -> TrainedOn:
    """Return what a model trains on, by its options: bidirectional attention needs masked tokens."""
    if hasattr(config, "colours"):
        return "images"
    if hasattr(config, "num_decoder_layers"):
        return "pairs"
    return "masked tokens" if hasattr(config, "segments") else "tokens"


def run_file_text(kind: type, data_kind: TrainedOn) -> str:
    """Return the text of the run file, which contains no text of the imported files.

    Args:
      kind: the class of the model's configuration.
      data_kind: what it trains on.

    Raises:
      ValueError: the class cannot be imported by its name.
    """
    if not all(part.isidentifier() for part in (*kind.__module__.split("."), kind.__qualname__)):
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} cannot be imported by its name")
    data = 'Tokens(path=Path("tokens.npy"), vocab=model.vocab, seq=min(model.seq, 1024))'
    more, readers, names = "", ["read_model"], ["Optimizer", "Run", "Schedule", "StartFrom"]
    about = "Its tokens are those of its tokenizer: write them with `shardtrain.data.write_tokens`, then"
    words = "--data.path my_tokens.npy"
    if data_kind == "images":
        data = 'ImageFiles(paths=(Path("images"),), classes=model.classes, size=model.height)'
        more = '        loss=classification_loss,\n        unit="examples",\n'
        names += ["ImageFiles", "classification_loss"]
        about = "Its images are in folders, one for each class, in the order of their names:"
        words = "--data my_images/"
    elif data_kind == "pairs":
        lines = ("TokenPairs(", '    source=Path("source.npy"),', '    target=Path("target.npy"),')
        lines += ("    vocab=model.vocab,", "    source_seq=min(model.seq, 512),")
        data, more = "\n        ".join((*lines, ")")), "        loss=translation_loss,\n"
        names += ["TokenPairs", "translation_loss"]
        words = "--data.source my_source.npy --data.target my_target.npy"
    elif data_kind == "masked tokens":
        token = f'read_mask_token(FOLDER / "{MODEL_FILE}", model.vocab)'
        lines = ("MaskedTokens(", f"    data={data},", f"    mask_token={token},", ")")
        data, more = "\n        ".join(lines), "        loss=masked_token_loss,\n"
        names += ["Tokens", "MaskedTokens", "masked_token_loss"]
        readers, words = ["read_mask_token", "read_model"], "--data.data.path my_tokens.npy"
    else:
        names.append("Tokens")
    names.sort(key=lambda name: (not name[0].isupper(), name))
    return f'''"""Trains the imported checkpoint in this folder further; {MODEL_FILE} describes its model.

{about}

shardtrain train {RUN_FILE} {words}
"""

from pathlib import Path

from shardtrain import {", ".join(names)}
from shardtrain.imported import {", ".join(readers)}
from {kind.__module__} import {kind.__qualname__}

FOLDER = Path(__file__).resolve().parent


def run() -> Run:
    model = read_model(FOLDER / "{MODEL_FILE}", {kind.__qualname__})
    return Run(
        model=model,
        data={data},
{more}        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-5, warmup=100)),
        start_from=StartFrom(checkpoint=FOLDER),
        run_dir=Path("runs") / FOLDER.name,
    )
'''
