"""Format fits to measured rows for `shardtrain advise predict`."""

import csv
import io
import statistics
from collections.abc import Sequence

from shardtrain.plan.advice.fit import (
    COLUMNS,
    QUANTITIES,
    MeasuredRow,
    Quantity,
    error_by_model,
    fits,
    predict,
)
from shardtrain.report.tables import table_text

MOST_MODELS = 12
"""Largest number of models whose errors are shown."""


def rows_text(rows: Sequence[MeasuredRow]) -> str:
    """Format measured rows as lines of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = [getattr(row, name) for name in COLUMNS]
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
    return text.getvalue() + "\n"


def fits_text(rows: Sequence[MeasuredRow], asked: MeasuredRow | None) -> str:
    """Format the fit of each measured quantity, its error on unseen models, and a prediction.

    Args:
      rows: the measured rows.
      asked: the run to predict, or None.

    Raises:
      ValueError: no quantity can be fitted.
    """
    found = [text for quantity in QUANTITIES if (text := _quantity_text(quantity, rows, asked))]
    if not found:
        raise ValueError(
            f"nothing can be predicted from {len(rows)} rows: step_seconds needs teraflops,"
            " checkpoint_seconds needs checkpoint_mb; or give startup_seconds"
        )
    return "\n".join(found)


def _quantity_text(quantity: Quantity, rows: Sequence[MeasuredRow], asked: MeasuredRow | None) -> str:
    found = fits(quantity, rows)
    if not found:
        return ""
    cells = [
        (kind or "all", *(f"{x:.4g}" for x in one.coefficients), f"{one.error:.1%}")
        for kind, one in found.items()
    ]
    text = table_text(("device", *quantity.names, "error"), cells, title=quantity.name)
    errors = error_by_model(quantity, rows)
    if errors:
        worst = sorted(errors.items(), key=lambda item: -item[1])[:MOST_MODELS]
        shown = ", ".join(f"{model} {error:.0%}" for model, error in worst)
        text += f"error on a model that was left out: {statistics.mean(errors.values()):.1%} ({shown})\n"
    else:
        text += "error on a model that was left out: not known, there is one model\n"
    if asked is not None:
        guess = predict(quantity, found, asked)
        text += f"predicted {quantity.name}: {'not known' if guess is None else f'{guess:.4g}'}\n"
    return text
