"""Real ranks: every way of summing, messages of every dtype, and who is missing is named."""

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from shardtrain.islands.bridge import Control, MpiGroup, world
from shardtrain.islands.options import REDUCE
comm = world()
rank, size = comm.rank, comm.size
for mode in REDUCE:
    group = MpiGroup(comm, mode, hosts=["b", "a", "b", "b", "a"][:size])
    for n in (0, 7, 70_000):
        x = jnp.arange(n, dtype=jnp.float32) + rank
        got = jax.jit(group.all_reduce)(x)
        np.testing.assert_allclose(got, size * np.arange(n) + sum(range(size)), rtol=1e-6)
group = MpiGroup(comm)
spans = [span for span in range(1, size + 1) if size % span == 0]
for span in spans:
    total = jax.jit(lambda x, span=span: group.all_reduce(x, span))(jnp.float32(rank))
    first = rank // span * span
    assert total == sum(range(first, first + span)), (span, total)
sources = [(i + 1) % size for i in range(size)]
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.int32, jnp.uint32, jnp.bool_):
    x = jnp.full((3, 2), rank + 1, dtype)
    moved = lambda x: (group.exchange(x, sources), group.all_gather(x), group.broadcast(x, size - 1))
    got = jax.jit(moved)(x)
    assert all(y.dtype == dtype for y in got)
    assert got[1].shape == (size, 3, 2)
    assert (got[0] == jnp.full((3, 2), (rank + 1) % size + 1, dtype)).all()
    assert (got[1] == jnp.stack([jnp.full((3, 2), r + 1, dtype) for r in range(size)])).all()
    assert (got[2] == jnp.full((3, 2), size, dtype)).all()
# chunks of at most 7 elements: the same bits as whole arrays, however many chunks there are
random = np.random.default_rng(rank)

def every(x, group):
    found = [group.all_reduce(x, span) for span in spans]
    for y in (x, x.astype(jnp.bfloat16)):
        found += [group.exchange(y, sources), group.all_gather(y), group.broadcast(y, size - 1)]
    return found

for mode in REDUCE:
    whole, chunked = (MpiGroup(comm, mode, most_elements=most) for most in (2**31 - 1, 7))
    for shape in ((3, 5), (2, 2, 7)):
        x = jnp.asarray(random.normal(size=shape), jnp.float32)
        expected, found = (jax.jit(lambda x, group=group: every(x, group))(x) for group in (whole, chunked))
        for a, b in zip(found, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(a, b)
calls = str(jax.make_jaxpr(chunked.all_gather)(np.zeros((2, 2, 7)))).count("allgather_mpi")
assert calls == (4 if size > 1 else 0), calls
control = Control(comm, [f"island {r}" for r in range(size)])
assert control.all_gather("hello", {"rank": rank}) == [{"rank": r} for r in range(size)]
print("done")
"""

MISSING = """
from shardtrain.islands.bridge import Control, RankTimeout, world
comm = world()
control = Control(comm, ["island 0 (host a)", "island 1 (host b)", "island 2 (host c)"])
control.all_gather("both are here")
if comm.rank != 1:
    try:
        control.all_gather("agreement", timeout_seconds=5)
    except RankTimeout as missing:
        print(missing, missing.ranks)
comm.Barrier()
late = Control(comm, ["zero", "one", "two"])
try:
    late.all_gather("save" if comm.rank == 2 else "evaluate")
except RankTimeout as missing:
    print(missing)
"""


def test_groups_and_messages_on_several_ranks(mpiexec):
    for num_ranks in (1, 4):
        assert mpiexec(num_ranks, PROGRAM) == ["done\n"] * num_ranks


@pytest.mark.full
def test_who_is_missing_is_named(mpiexec):
    texts = mpiexec(3, MISSING)
    first = "island 1 (host b) did not reach 'agreement' within 5 s (1,)\n"
    assert texts[0] == first + "zero is at 'evaluate', but two at 'save'\n"
    assert texts[1] == "one is at 'evaluate', but two at 'save'\n"
    assert texts[2] == first + "two is at 'save', but zero at 'evaluate', one at 'evaluate'\n"
