"""Explain errors of XLA and of device runtimes: the reason, the operation, and the change to make. No jax."""

import re

LONGEST_REASON = 300
"""Largest number of characters of a compiler's reason in a message."""

_CHANGES = {
    "sdy.manual_computation": "a shard_map of the model that is manual over some axes of the mesh only cannot"
    " be mapped over replicas; make it manual over all of them: leave axis_names out",
    "RESOURCE_EXHAUSTED": "it needs more memory than the device has; use more microbatches (--accumulate),"
    " --remat full or more devices (shardtrain inspect --compile shows what a step holds)",
}
"""Part of a compiler's message -> the change to make."""

_OTHER_CHANGE = "try a mesh of one axis (--mesh data=-1), or write the operation in another way"


def compiler_text(error: BaseException) -> str | None:
    """Return the message for an error of XLA or of jax's lowering; None for any other error.

    >>> error = ValueError('''Cannot lower jaxpr with verifier errors:
    ...     'sort' op must have one dim
    ...     at loc("jvp()/sort"(callsite("Net.__call__"("net.py":16:16 to :104)))''')
    >>> compiler_text(error).partition("; ")[0].partition(": ")[2]
    "'sort' op must have one dim. The operation is 'jvp()/sort', called at net.py:16"
    """
    words = str(error)
    in_lowering = words.startswith("Cannot lower jaxpr")
    # exceptions in callbacks of the user come this way too, and have their own traceback
    if not in_lowering and (type(error).__name__ != "JaxRuntimeError" or "callback" in words.lower()):
        return None
    reasons = [line.strip() for line in words.splitlines()[in_lowering:] if line.strip()]
    # jax 0.12 nests call sites
    found = re.search(r'loc\("([^"]*)"\((?:callsite\()+"[^"]*"\("([^"]*)":(\d+)', words)
    operation = f". The operation is {found[1]!r}, called at {found[2]}:{found[3]}" if found else ""
    change = next((text for sign, text in _CHANGES.items() if sign in words), _OTHER_CHANGE)
    return f"the compiler refused the program: {''.join(reasons[:1])[:LONGEST_REASON]}{operation}; {change}"


def platform_text(error: BaseException) -> str | None:
    """Return the message for a platform of JAX_PLATFORMS that jax cannot start; None for any other error.

    >>> platform_text(RuntimeError("Unable to initialize backend 'tpuu': it is unknown")).partition(": ")[0]
    "jax cannot start the platform 'tpuu' of JAX_PLATFORMS"
    """
    found = re.match(r"Unable to initialize backend '(\w+)': ([^\n]*)", str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    reason = found[2].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    return (
        f"jax cannot start the platform {found[1]!r} of JAX_PLATFORMS: {reason[:LONGEST_REASON]}. Name one"
        " that is installed, such as JAX_PLATFORMS=cpu, or unset it: then jax uses the fastest that it finds"
    )
