"""A BERT that finds hidden bytes of real text, by default the sources of Python's standard library.

shardtrain train examples/bert_text.py --cpu-devices 8 --mesh data=2,fsdp=2,tensor=2
"""

from shardtrain import MaskedTokens, Optimizer, Run, Schedule, Text, masked_token_loss
from shardtrain.models.encoder import EncoderConfig

SEQ = 128
NO_BYTE_OF_TEXT = 255
"""UTF-8 has no such byte: it stands for a hidden one."""


def run() -> Run:
    text = Text(seq=SEQ)
    return Run(
        model=EncoderConfig(vocab=text.vocab, seq=SEQ, embed=128, num_layers=4, num_heads=8, mlp=512),
        data=MaskedTokens(data=text, mask_token=NO_BYTE_OF_TEXT),
        loss=masked_token_loss,
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-3, warmup=30)),
        batch=16,
        steps=300,
    )
