"""A batch that grows during a run: after so many steps, a step takes so many batches. Values only, no jax.

Next: `feed.py`, which changes the loader at these steps.
"""

from typing import Any

from shardtrain.errors.messages import problems_error

FORM = "give STEPS:BATCHES for each change, such as 500:2,1000:4"


def parse_growth(text: str) -> dict[int, int]:
    """Return number of steps done -> number of batches that each step takes from then on.

    Raises:
      ValueError: lists everything that is no such pair, or out of order.

    >>> parse_growth("500:2, 1000:4")
    {500: 2, 1000: 4}
    """
    found: dict[int, int] = {}
    problems = []
    for pair in filter(None, map(str.strip, text.split(","))):
        steps, _, batches = (part.strip() for part in pair.partition(":"))
        if not (steps.isdecimal() and batches.isdecimal() and int(steps) > 0 and int(batches) > 0):
            problems.append(f"{pair!r} is no two numbers from 1; {FORM}")
        elif found and int(steps) <= max(found):
            problems.append(f"{pair!r} comes after step {max(found)}; give the changes in their order")
        else:
            found[int(steps)] = int(batches)
    if problems:
        raise problems_error(f"batch_growth {text!r} cannot be read", problems)
    return found


def growth_problems(run: Any) -> list[str]:
    """Return why a run cannot have a growing batch, one line each.

    Args:
      run: see `config.Run`.
    """
    text, strategy = run.batch_growth, run.strategy
    try:
        growth = parse_growth(text)
    except ValueError as error:
        return [str(error)]
    if not growth:
        return []
    refused = {
        "across 'pipeline'": strategy.across.axis == "pipeline",
        "shares 'auto'": strategy.across.shares == "auto",
        "batch_unit 'tokens'": run.batch_unit == "tokens",
        "a schedule from a .csv": strategy.pipeline.schedule.endswith(".csv")
        and strategy.layout.mesh.get("pipeline", 1) != 1,
        "scaling.steps": run.scaling.steps,
        "clock_distance": strategy.synchronisation.distance is not None,
    }
    why = {
        "across 'pipeline'": "the schedule of its stages has one number of microbatches; use a mesh with the"
        " axis pipeline, or islands without stages",
        "shares 'auto'": "a step's time then tells no speed; give weights, such as --shares 2,1",
        "batch_unit 'tokens'": "positions in the data are those of batches of one size; use examples",
        "a schedule from a .csv": "its table has one number of microbatches; use a schedule by name, such as"
        " --schedule 1f1b",
        "scaling.steps": "the steps of the run are divided by the replicas, and those of its growth are not;"
        " give both for all replicas, without scaling.steps",
        "clock_distance": "islands that are ahead would change their batches earlier; use local steps",
    }
    return [
        f"batch_growth is {text!r}, which cannot be with {name}: {why[name]}, or leave batch_growth out"
        for name, is_there in refused.items()
        if is_there
    ]
