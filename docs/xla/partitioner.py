"""What XLA's partitioner gets wrong in plain `jax.jit`: losses and gradients on a mesh against one device.

    python partitioner.py     # needs jax and numpy; each case in a process of its own, as some end it

Only inputs and outputs have shardings; no operation is constrained. The results: `README.md` in this folder.
"""

import os
import subprocess
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
random = np.random.default_rng(0)


def normal(*shape):
    return jnp.array(random.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)


def convolve(x, kernel, groups=1):
    window = "HW"[: x.ndim - 2]
    dims = (f"N{window}C", f"{window}IO", f"N{window}C")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,) * len(window), "SAME", dimension_numbers=dims, feature_group_count=groups
    )


def dense(kernels, x):
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return x


def convolutions(kernels, x):
    return convolve(jax.nn.silu(convolve(x, kernels[0])), kernels[1])


def fourier(kernels, x):
    return jnp.fft.fft2(x @ kernels[0]).real @ kernels[1]


ROWS = P(("data", "fsdp"))
KERNEL = P("fsdp", "tensor")
WINDOW = P(None, None, "fsdp", "tensor")
rows, images, sequences = normal(16, 16), normal(16, 4, 4, 16) * 16, normal(16, 10, 16)

CASES = {
    "two dense layers, kernels over (fsdp, tensor)": (
        dense,
        [normal(16, 16), normal(16, 16)],
        [KERNEL] * 2,
        rows,
        SIZES,
    ),
    "two 3 x 3 convolutions of 4 x 4 pixels": (
        convolutions,
        [normal(3, 3, 16, 32), normal(3, 3, 32, 32)],
        [WINDOW] * 2,
        images,
        SIZES,
    ),
    "1 x 1 convolution of 4 groups, channels over 2 devices": (
        lambda kernels, x: convolve(x, kernels[0], groups=4),
        [normal(1, 1, 4, 16)],
        [P(None, None, None, "tensor")],
        images,
        {"tensor": 2},
    ),
    "3 x 3 convolution of 2 groups, channels over 4 devices": (
        lambda kernels, x: convolve(x, kernels[0], groups=2),
        [normal(3, 3, 8, 16)],
        [P(None, None, None, "tensor")],
        images,
        {"tensor": 4},
    ),
    "FFT between two dense layers": (
        fourier,
        [normal(16, 16), normal(16, 16)],
        [KERNEL] * 2,
        sequences,
        SIZES,
    ),
}
"""Name -> function of (kernels, x), kernels, their specs, x, mesh."""


def compare(apply, kernels, specs, x, sizes):
    """Return the relative difference of the loss, and of the gradient of each kernel."""

    def loss(kernels, x):
        y = apply(kernels, x)
        return jnp.sum((y - 1) ** 2) / y.size

    def sharding(spec):
        return NamedSharding(mesh, spec)

    value, grads = jax.device_get(jax.jit(jax.value_and_grad(loss))(kernels, x))
    mesh = Mesh(
        np.array(jax.devices()[: np.prod(list(sizes.values()))]).reshape(*sizes.values()), tuple(sizes)
    )
    placed = [jax.device_put(kernel, sharding(spec)) for kernel, spec in zip(kernels, specs, strict=True)]
    x = jax.device_put(x, sharding(ROWS if "data" in sizes else P()))
    outputs = sharding(P()), [sharding(spec) for spec in specs]
    got, got_grads = jax.device_get(jax.jit(jax.value_and_grad(loss), out_shardings=outputs)(placed, x))
    off = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got_grads, grads, strict=True)]
    return abs(float(got - value) / float(value)), off


def main(argv):
    if argv:
        loss, grads = compare(*CASES[argv[0]])
        kind = "WRONG" if max(loss, *grads) > 1e-3 else "right"
        off = ", ".join(f"{each:.0e}" for each in grads)
        print(f"{kind}  {argv[0]}: loss off by {loss:.0e}, gradients by {off}")
        return
    print(f"jax {jax.__version__}")
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=False)
        errors = [line for line in done.stderr.splitlines() if "Check failed" in line or "Error:" in line]
        print(done.stdout.strip() or f"ENDS   {name}: exit code {done.returncode}, {(errors or [''])[0]}")


main(sys.argv[1:])
