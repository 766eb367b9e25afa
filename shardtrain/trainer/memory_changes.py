"""The options of a run that save memory, each tried alone: the run with it, for its compiled step."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any

from shardtrain.functional.remat_policies import REMAT_POLICIES
from shardtrain.optim.optimizer import Optimizer
from shardtrain.trainer.config import Run


def memory_changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield (option, the run with it) of each option that the run does not have, and that may save memory.

    Args:
      run: the run; its strategy is that of one island.
    """
    strategy, model = run.strategy, run.model
    remat = strategy.remat or getattr(model, "remat", None)
    for policy in ("none", *REMAT_POLICIES):
        if policy != remat:
            yield f"--remat {policy}", replace(run, strategy=replace(strategy, remat=policy))
    more = 2 * strategy.accumulate
    yield f"--accumulate {more}", replace(run, strategy=replace(strategy, accumulate=more))
    if strategy.accumulate > 1 and strategy.accumulate_dtype == "float32":
        changed_strategy = replace(strategy, accumulate_dtype="bfloat16")
        yield "--accumulate-dtype bfloat16", replace(run, strategy=changed_strategy)
    if strategy.offload == "none":
        yield "--offload optimizer", replace(run, strategy=replace(strategy, offload="optimizer"))
    if _is_unset(model, "loss_chunk") and (seq := getattr(model, "seq", None)):
        changed: Any = replace(model, loss_chunk=seq)
        yield f"--model.loss-chunk {seq}", replace(run, model=changed)
    named = run.optimizer
    if isinstance(named, Optimizer) and named.momentum_dtype == "float32" and named.name != "adafactor":
        optimizer = replace(named, momentum_dtype="bfloat16")
        yield "--optimizer.momentum-dtype bfloat16", replace(run, optimizer=optimizer)


def _is_unset(model: Any, name: str) -> bool:
    return is_dataclass(model) and getattr(model, name, 0) is None
