"""What products in 8 bits change in a step compiled for 8 H100: bytes of gathered kernels, kinds of products.

No GPU is needed, nothing runs:

    JAX_PLATFORMS=cpu uv run --extra ahead-of-time python benchmarks/float8.py
"""

import re
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import optax

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import llama_small
from shardtrain.plan.compile import compile_step, described_devices, figures
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

ROWS, SEQ = 16, 1024


def compiled(products: str) -> tuple[dict[str, float], Counter[str]]:
    """Return bytes that a device receives by all-gathers, and the number of products, both by dtype."""
    config = llama_small(seq=SEQ, num_layers=4, dtype="bfloat16", products=products)
    layout = Layout(mesh={"fsdp": 8})
    mesh = make_mesh(layout, described_devices("h100", 8))
    model, optimizer = from_nnx(config), optax.adamw(1e-3)
    batch = {
        "tokens": jax.ShapeDtypeStruct((ROWS, SEQ + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    }
    placement = make_placement(model, optimizer, layout, mesh)
    step = compile_step(model, next_token_loss, optimizer, placement, batch)
    gathered = defaultdict(float)
    for collective in figures(step, dict(mesh.shape)).collectives:
        if collective.kind == "all-gather":
            gathered[collective.dtype] += collective.wire_bytes_per_device
    # the type of the first operand of every product
    return dict(gathered), Counter(operand_dtypes(step.as_text() or ""))


def operand_dtypes(text: str) -> list[str]:
    """Return the dtype of the first operand of each product in the text of a compiled program."""
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    return [dtypes[name] for name in re.findall(r" dot\(%?([\w.-]+),", text)]


def main() -> None:
    for products in ("", "float8"):
        gathered, dots = compiled(products)
        sizes = ", ".join(f"{dtype} {size / 1e6:.1f} MB" for dtype, size in sorted(gathered.items()))
        kinds = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(dots.items()))
        print(f"products={products or 'bfloat16'}: gathered {sizes}; products {kinds}")


if __name__ == "__main__":
    main()
