"""Trains on from the imported checkpoint in this folder; model.json describes its model.

Its tokens are those of its tokenizer: write them with `shardtrain.data.write_tokens`, then

shardtrain train run.py --data.path my_tokens.npy
"""

from pathlib import Path

from shardtrain import Optimizer, Run, Schedule, StartFrom, Tokens
from shardtrain.imported import read_model
from shardtrain.models.decoder import DecoderConfig

FOLDER = Path(__file__).resolve().parent


def run() -> Run:
    model = read_model(FOLDER / "model.json", DecoderConfig)
    return Run(
        model=model,
        data=Tokens(path=Path("tokens.npy"), vocab=model.vocab, seq=min(model.seq, 1024)),
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-5, warmup=100)),
        start_from=StartFrom(checkpoint=FOLDER),
        run_dir=Path("runs") / FOLDER.name,
    )
