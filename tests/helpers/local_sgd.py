"""Local steps and merges in float64, replica by replica: the reference of every way to synchronise."""

import jax
import numpy as np
from gossip import Gossip

from shardtrain.combine.fragments import group_by_path, restore_paths


def local_sgd(
    gradient,
    params,
    counts,
    num_steps,
    synchronisation,
    rate,
    fragments,
    last_step=-1,
    synchronises=lambda deltas, common: True,
):
    """The common parameters after each step, path -> float64; replicas are averaged by their counts.

    Args:
      gradient: (params, replica, step) -> the mean gradient of this replica's rows.
      params: before the first step.
      counts: examples of each replica in a step.
      num_steps: how many.
      synchronisation: on deltas, by "mean", or `Gossip`; in its synchronous steps gradients are averaged.
      rate: of the replicas' own plain SGD.
      fragments: which rows of which array are merged together.
      last_step: in which all that was changed is combined.
      synchronises: (path -> each replica's deltas, path -> common parameters) -> whether a fragment is sent.
    """
    every, overlap, outer = synchronisation.every, synchronisation.overlap, synchronisation.outer
    common = {path: np.asarray(x, np.float64) for path, x in group_by_path(params).items()}
    own = [{path: x.copy() for path, x in common.items()} for _ in counts]
    velocity = {path: np.zeros_like(x) for path, x in common.items()}
    shares = np.asarray(counts, np.float64) / sum(counts)
    under_way = {}
    if is_gossip := isinstance(synchronisation, Gossip):
        fragments = fragments[:1]

    def rows_of(fragment):
        return {path: slice(None) if rows is None else np.array(rows) for path, rows in fragment.rows.items()}

    def arrive(number, fragment):
        sent = under_way.pop(number)
        for path, at in rows_of(fragment).items():
            delta = sum(share * x for share, x in zip(shares, sent[path], strict=True))
            v = velocity[path][at] = outer.momentum * velocity[path][at] + delta
            before = common[path][at].copy()
            common[path][at] += outer.learning_rate * (delta + outer.momentum * v if outer.nesterov else v)
            for x, own_delta in zip(own, sent[path], strict=True):
                # what it changed since it sent stays its own
                x[path][at] = common[path][at] + (x[path][at] - before - own_delta)

    def gradient_of(replica, step):
        at = restore_paths(params, {p: x.astype(np.float32) for p, x in own[replica].items()})
        found = group_by_path(jax.device_get(gradient(at, replica, step)))
        return {path: np.asarray(g, np.float64) for path, g in found.items()}

    found = []
    for step in range(1, num_steps + 1):
        gradients = {replica: gradient_of(replica, step) for replica, count in enumerate(counts) if count}
        if step <= synchronisation.synchronous_steps:
            for path in common:
                common[path] -= rate * sum(shares[replica] * g[path] for replica, g in gradients.items())
                for x in own:
                    x[path][...] = common[path]
            found.append({path: x.copy() for path, x in common.items()})
            continue
        for replica, found_here in gradients.items():
            for path, g in found_here.items():
                own[replica][path] -= rate * g
        is_last = step == last_step
        for number, fragment in enumerate(fragments):
            since = step - (number + 1) * every // len(fragments)
            if number in under_way and ((since - overlap) % every == 0 or is_last):
                arrive(number, fragment)
            if since % every and not is_last:
                if is_gossip:
                    own = [
                        {path: (x + before[path]) / 2 for path, x in each.items()}
                        for each, before in zip(own, [own[-1], *own], strict=False)
                    ]
                continue
            rows = rows_of(fragment).items()
            deltas = {path: [x[path][at] - common[path][at] for x in own] for path, at in rows}
            if is_last or synchronises(deltas, {path: common[path][at] for path, at in rows}):
                under_way[number] = deltas
                if is_last or not overlap:
                    arrive(number, fragment)
        found.append({path: x.copy() for path, x in common.items()})
    return found
