r"""Pretraining from Parquet shards, with a tokenizer trained on them; without shards, some are written.

shardtrain train examples/corpus_pretraining.py
shardtrain train examples/corpus_pretraining.py --data.paths 'web/**/*.parquet' --data.vocab 32768 \
    --model.vocab 32768
"""

import os
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from shardtrain import Corpus, Optimizer, Run, Schedule
from shardtrain.data.corpus import Packing, corpus_files
from shardtrain.data.documents import sample_texts
from shardtrain.data.huggingface_tokenizer import train_tokenizer
from shardtrain.models.decoder import DecoderConfig

SEQ, VOCAB = 128, 2048
DOCUMENTS_IN_SHARD = 100


def written(folder: Path) -> Path:
    """Return a folder of Parquet shards of the standard library's source; written where it is not there."""
    if not (folder / "shards").exists():
        folder.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(dir=folder))
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        for first in range(0, len(paths), DOCUMENTS_IN_SHARD):
            some = paths[first : first + DOCUMENTS_IN_SHARD]
            texts = [path.read_text(errors="replace") for path in some]
            table = pyarrow.table({"text": texts, "name": [path.name for path in some]})
            pyarrow.parquet.write_table(table, begun / f"{first:05}.parquet")
        try:  # another rank may have been faster
            os.rename(begun, folder / "shards")
        except OSError:
            shutil.rmtree(begun)
    return folder / "shards"


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """Documents in Parquet shards, as tokens of a tokenizer that is trained on them at the first start.

    Args:
      paths: the shards: files, folders and patterns.
      vocab: number of tokens of the tokenizer at most.
      sample_bytes: text that the tokenizer is trained on, about.
      seq: tokens per window.
      packing: whether documents of a window see each other, as of `Corpus`.
    """

    paths: tuple[Path, ...] = ()
    vocab: int = VOCAB
    sample_bytes: int = 4_000_000
    seq: int = SEQ
    packing: Packing = "separate"

    def train(self, folder: Path) -> Any:
        return self.corpus(folder).train(folder)

    def heldout(self, folder: Path) -> Any:
        return self.corpus(folder).heldout(folder)

    def summary(self, folder: Path) -> str:
        return self.corpus(folder).summary(folder)

    def corpus(self, folder: Path) -> Corpus:
        paths = self.paths or (written(folder),)
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.exists():
            texts = sample_texts(corpus_files(paths), "text", self.sample_bytes)
            train_tokenizer(texts, self.vocab, tokenizer)
        return Corpus(paths=paths, tokenizer=str(tokenizer), seq=self.seq, packing=self.packing)


def run() -> Run:
    return Run(
        model=DecoderConfig(vocab=VOCAB, seq=SEQ, embed=128, num_layers=4, num_heads=8, mlp=512),
        data=TrainedTokens(),
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-3, warmup=30)),
        batch=16,
        steps=300,
    )
