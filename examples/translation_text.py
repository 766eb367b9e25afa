"""A small translation model, with batches counted in tokens: words are renamed, and neighbours swapped.

shardtrain launch --islands 2 -- train examples/translation_text.py --shares auto
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain import Optimizer, Run, Schedule, translation_loss
from shardtrain.models.encoder_decoder import EncoderDecoderConfig

BEGIN, LONGEST, VOCAB = 0, 32, 256
"""The token before a sentence, also padding; the words of the longest sentence; tokens in the vocabulary."""


class Sentences:
    """Sentences of 2 to 32 words, each with its translation."""

    def __init__(self, sentences: list[list[int]]):
        self.sentences = sentences
        self.lengths = [len(sentence) for sentence in sentences]
        # which word stands for which is the same everywhere
        self.renamed = np.r_[BEGIN, 1 + np.random.default_rng(0).permutation(VOCAB - 1)]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = np.array(self.sentences[index], np.int32)
        # 0 1 2 3 4 -> 1 0 3 2 4
        swapped = source.copy()
        pairs = len(source) // 2 * 2
        swapped[:pairs] = source[:pairs].reshape(-1, 2)[:, ::-1].reshape(-1)
        return {"source": source, "target": np.r_[BEGIN, self.renamed[swapped]].astype(np.int32)}


@dataclass(frozen=True, kw_only=True)
class TranslationData:
    """The commonest words of Python's standard library, line by line."""

    num_heldout: int = 500

    def sentences(self) -> list[list[int]]:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = "\n".join(file.read_text("utf-8") for file in files)
        lines = [re.findall("[a-z]+", line) for line in text.splitlines()]
        common = Counter(word for words in lines for word in words).most_common(VOCAB - 1)
        token = {word: number for number, (word, _) in enumerate(common, start=1)}
        known = ([token[word] for word in words if word in token] for words in lines)
        return [words for words in known if 2 <= len(words) <= LONGEST]

    def train(self, folder: Path) -> Sentences:
        return Sentences(self.sentences()[: -self.num_heldout])

    def heldout(self, folder: Path) -> Sentences:
        return Sentences(self.sentences()[-self.num_heldout :])


def run() -> Run:
    return Run(
        model=EncoderDecoderConfig(
            vocab=VOCAB, seq=LONGEST, embed=64, num_encoder_layers=2, num_decoder_layers=2, num_heads=4
        ),
        data=TranslationData(),
        loss=translation_loss,
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=3e-3, warmup=30)),
        batch=1024,
        batch_unit="tokens",
        steps=300,
    )
