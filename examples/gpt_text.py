"""The main job: a GPT on the bytes of real text, by default the sources of Python's standard library.

shardtrain train examples/gpt_text.py --data my_texts/ --steps 2000 --model.num-layers 8
"""

import jax

from shardtrain import Optimizer, Run, Schedule, Text
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.generate import generate
from shardtrain.models.sampling import Sampling

SEQ = 128


def sample(apply) -> str:
    """What the model writes after a beginning."""
    prompt = list(b"def ")
    sampling = Sampling(temperature=0.7)
    key = jax.random.key(0)
    (found,) = generate(apply, [prompt], SEQ - len(prompt), key, seq=SEQ, sampling=sampling, cached=True)
    return "sample:\n" + bytes([*prompt, *found.tolist()]).decode("utf-8", errors="replace")


def run() -> Run:
    data = Text(seq=SEQ)
    return Run(
        model=DecoderConfig(vocab=data.vocab, seq=SEQ, embed=128, num_layers=4, num_heads=8, mlp=512),
        data=data,
        optimizer=Optimizer(learning_rate=Schedule(name="cosine", peak=2e-3, warmup=30)),
        batch=16,
        steps=300,
        sample=sample,
    )
