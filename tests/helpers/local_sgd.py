"""Local steps and merges in float64, replica by replica: the reference of every way to synchronise."""

import jax
import numpy as np

from shardtrain.combine.fragments import by_path, like_paths


def local_sgd(gradient, params, counts, num_steps, synchronisation, rate, fragments):
    """The common parameters after each step, path -> float64; replicas are averaged by their counts.

    Args:
      gradient: (params, replica, step) -> the mean gradient of this replica's rows.
      params: before the first step.
      counts: examples of each replica in a step.
      num_steps: how many.
      synchronisation: on deltas, by "mean".
      rate: of the replicas' own plain SGD.
      fragments: which rows of which array are merged together.
    """
    outer = synchronisation.outer
    common = {path: np.asarray(x, np.float64) for path, x in by_path(params).items()}
    own = [{path: x.copy() for path, x in common.items()} for _ in counts]
    velocity = {path: np.zeros_like(x) for path, x in common.items()}
    shares = np.asarray(counts, np.float64) / sum(counts)
    found = []
    for step in range(1, num_steps + 1):
        for replica, count in enumerate(counts):
            if count:
                at = like_paths(params, {p: x.astype(np.float32) for p, x in own[replica].items()})
                for path, g in by_path(jax.device_get(gradient(at, replica, step))).items():
                    own[replica][path] -= rate * np.asarray(g, np.float64)
        for number, fragment in enumerate(fragments):
            if step % synchronisation.every != (number + 1) * synchronisation.every // len(fragments) % (
                synchronisation.every
            ):
                continue
            for path, rows in fragment.rows.items():
                at = slice(None) if rows is None else np.array(rows)
                delta = sum(
                    share * (x[path][at] - common[path][at]) for share, x in zip(shares, own, strict=True)
                )
                v = velocity[path][at] = outer.momentum * velocity[path][at] + delta
                moved = delta + outer.momentum * v if outer.nesterov else v
                common[path][at] += outer.learning_rate * moved
                for x in own:
                    x[path][at] = common[path][at]
        found.append({path: x.copy() for path, x in common.items()})
    return found
