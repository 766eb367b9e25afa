"""Fine-tune a model of Hugging Face on conversations: a folder in, low-rank adapters, a folder out.

The folder is made here, of random parameters and a tokenizer trained on the spot; a download does as well.

python examples/fine_tune.py
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

import shardtrain as st
from shardtrain import cli
from shardtrain.data.huggingface_tokenizer import HuggingFaceTokenizer, train_tokenizer
from shardtrain.functional.model import path_text
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.files import export_model
from shardtrain.models.lora import Lora

TALKS = [
    [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    for a in range(10)
    for b in range(10)
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}"
)


def make_folder(out: Path, tokenizer: Path) -> None:
    """Write a Llama with random parameters, its tokenizer and its chat template, as downloads have them."""
    train_tokenizer(
        (message["content"] for talk in TALKS for message in talk), 300, tokenizer / "tokenizer.json"
    )
    about = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
    model = DecoderConfig(
        vocab=HuggingFaceTokenizer(tokenizer / "tokenizer.json").vocab, seq=128, embed=32, num_layers=2,
        num_heads=4, num_kv_heads=2, mlp=64, positions="rotary", norm="rmsnorm", activation="swiglu",
        bias=False,
    )  # fmt: skip
    params, _ = st.from_nnx(model).init(jax.random.key(0))
    arrays = {path_text(path): array for path, array in jax.tree.leaves_with_path(jax.device_get(params))}
    shapes = {path: array.shape for path, array in arrays.items()}
    export_model(out, vars(model), shapes, arrays.__getitem__, tokenizer=tokenizer)


def main(folder: Path = Path("runs/fine_tune"), steps: int = 60) -> float:
    """Train the adapters, export the merged model, and return how far its logits are from the run's."""
    base, tuned, merged, talks = (folder / name for name in ("base", "tuned", "merged", "talks.jsonl"))
    if not base.exists():
        make_folder(base, folder / "tokenizer")
        talks.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    model = st.read_pretrained(base, lora=Lora(rank=8))
    run = st.Run(
        model=model,
        data=st.Chat(paths=(talks,), tokenizer=str(base), seq=128),
        start_from=st.StartFrom(checkpoint=base),
        optimizer=st.Optimizer(learning_rate=st.Schedule(name="constant", peak=0.03)),
        batch=8,
        steps=steps,
        run_dir=tuned,
    )
    st.train(run)
    if not merged.exists():
        cli.main(["checkpoint", "export", str(tuned), str(merged), "--tokenizer", str(base)])
    tokens = jnp.arange(64)[None]
    of_run = st.load(tuned, model)(tokens)
    return float(jnp.abs(st.load(merged, st.read_pretrained(merged))(tokens) - of_run).max())


if __name__ == "__main__":
    print(f"logits of the exported model differ by at most {main():.1e}")
