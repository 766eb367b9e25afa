"""Detect dim names that a stack of layers has moved by one dim, as `nnx.vmap` may do. No jax.

Next: `sharding/array_dims.py`, what names are.
"""

from collections.abc import Iterable, Mapping

from shardtrain.sharding.array_dims import NamedArray


def warn_shifted_names(arrays: Mapping[str, NamedArray]) -> str | None:
    """Return a warning if moving the names of some arrays by one dim would make their sizes consistent.

    Args:
      arrays: path -> names and shape of each parameter.

    >>> found = warn_shifted_names({
    ...     "blocks/bias": NamedArray(dims=("mlp", None), shape=(4, 64)),
    ...     "blocks/kernel": NamedArray(dims=("embed", "mlp", None), shape=(4, 16, 64)),
    ...     "embedding": NamedArray(dims=("vocab", "embed"), shape=(32, 16)),
    ... })
    >>> print(found[: found.index(": mlp")])
    WARNING: names of dims seem to have moved by one dim in blocks/bias, blocks/kernel
    >>> print(warn_shifted_names({"up": NamedArray(dims=("embed", "mlp"), shape=(16, 64))}))
    None
    """
    named = {path: _fill_dims(each) for path, each in arrays.items() if each.dims and any(each.dims)}
    sizes = _find_sizes(named.values())
    # a stack has one name too few, so its last dim has none
    moved = {
        path: NamedArray(dims=(None, *dims[:-1]), shape=each.shape)
        for path, each in named.items()
        if (dims := each.dims) and len(dims) > 1 and dims[0] and not dims[-1]
        if any(len(sizes[name]) > 1 for name in dims if name)
    }
    after = _find_sizes((named | moved).values())
    cured = [name for name in sizes if len(sizes[name]) > 1 and len(after[name]) == 1]
    if not cured:
        return None
    paths = [path for path, each in moved.items() if set(each.dims or ()) & set(cured)]
    found = "; ".join(f"{name} has sizes {', '.join(map(str, sorted(sizes[name])))}" for name in cured)
    return (
        f"WARNING: names of dims seem to have moved by one dim in {', '.join(paths)}: {found}. A stack of"
        " layers counts layers first, so these parameters are sharded and decayed by the wrong dims; name"
        " that dim: nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME: 'layers'}), or names=... of the run"
    )


def _fill_dims(array: NamedArray) -> NamedArray:
    dims = array.dims or ()
    return NamedArray(dims=(*dims, *(None,) * (len(array.shape) - len(dims))), shape=array.shape)


def _find_sizes(arrays: Iterable[NamedArray]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for array in arrays:
        for name, size in zip(array.dims or (), array.shape, strict=False):
            if name is not None:
                found.setdefault(name, set()).add(size)
    return found
