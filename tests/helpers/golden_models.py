"""Small models of Hugging Face's families with what transformers computes, from models/make_golden.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "models" / "golden"


def load_golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file: "weight/...", "gradient/...", inputs, "logits", "loss"."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {each: file[each] for each in file.files}


def select(golden: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin so, without that."""
    return {name.removeprefix(prefix): x for name, x in golden.items() if name.startswith(prefix)}


def load_model(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config.json and the state dict of a file."""
    golden = load_golden(name)
    return json.loads(str(golden["config"])), select(golden, "weight/")
