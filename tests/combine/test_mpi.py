"""The combiners over MPI give what the references give, for 1 to 3 ranks, with `--full` 9."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = [(3,), (12, 10), (), (0,)]
TOLERANCES = {
    "mean": 2e-6,
    "adasum": 1e-5,
    "sum": 2e-6,
    "bfloat16+mean": 2**-6,
    "float16+adasum": 2**-8,
    "int8+adasum": 2e-4,
    "top_k:0.2+mean": 1e-5,
    "power_sgd:2+mean": 2e-4,
}
CASES = [f"adasum@{size}" for size in (2, 3, 9)] + ["mean@1", "mean@3"]
CASES += [f"{name}@3" for name in TOLERANCES if name not in ("mean", "adasum")]


def test_combiners_over_mpi_equal_their_references(mpiexec, tmp_path, references, pytestconfig):
    # nine ranks are again an odd one, after a tree of eight
    num_ranks = 9 if pytestconfig.getoption("--full") else 3
    cases = [case for case in CASES if int(case.split("@")[1]) <= num_ranks]
    random = np.random.default_rng(0)
    data = {
        f"{step}/{i}": random.normal(size=(9, *shape)) + 0.5
        for step in (0, 1)
        for i, shape in enumerate(SHAPES)
    }
    data = {k: x.astype(np.float32) for k, x in data.items()}
    for step in (0, 1):  # what bfloat16 holds exactly
        data[f"{step}/0"] = np.asarray(jnp.asarray(data[f"{step}/0"], jnp.bfloat16), np.float32)
    counts = np.array([1, 3, 2, 5, 1, 1, 2, 4, 1], np.float32)
    arrays: dict = {"counts": counts, "leaves": len(SHAPES), **data}
    np.savez(tmp_path / "inputs.npz", **arrays)
    mpiexec(
        num_ranks,
        Path(__file__).parent / "mpi_program.py",
        tmp_path / "inputs.npz",
        tmp_path / "found.npz",
        *cases,
    )
    found = np.load(tmp_path / "found.npz")
    for case in cases:
        name, size = case.split("@")[0], int(case.split("@")[1])
        combine = references.of(name, [jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES], size)
        for step in (0, 1):
            ranks = [[data[f"{step}/{i}"][r].astype(float) for i in range(len(SHAPES))] for r in range(size)]
            empty = (np.arange(size) == 1) & (step == 1)
            expected = combine(ranks, np.where(empty, 0, counts[:size]))
            for i, y in enumerate(expected):
                if i == 0 and size != 3:
                    continue
                x = found[f"{case}/{step}/{i}"]
                assert x.shape == SHAPES[i]
                scale = max(np.abs(leaves[i]).max(initial=0) for leaves in ranks)
                # the first leaf is bfloat16: rounded after each level
                tolerance = max(TOLERANCES[name], 2**-5) if i == 0 else TOLERANCES[name]
                np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=f"{case} {step} {i}")
