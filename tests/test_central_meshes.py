"""The law on every mesh of 8 devices that shards positions or experts: the loss and gradients of one device.

One tiny decoder with experts, of which every axis has something to shard, and one program for the reference.
`test_central.py` has the other axes, and more options of these two.
"""

import itertools
from functools import cache

import numpy as np
import pytest
from mesh_gradients import compute_gradients

from shardtrain.axes import AXES, CONTEXT, EXPERT, PIPELINE
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.sharding.layout import ContextAttentions, Layout

MODEL = DecoderConfig(
    vocab=32, seq=16, embed=16, num_layers=2, num_heads=8, head_dim=2, mlp=8, activation="swiglu", bias=False,
    remat="none", experts=Experts(num=8, top=2, capacity=1.0, balance=0.1),
)  # fmt: skip
ROWS = 16


def meshes():
    """Each choice of three axes of 2, of two of 4 and 2, and one of 8, that has context or expert."""
    found = [dict.fromkeys(three, 2) for three in itertools.combinations(AXES, 3)]
    found += [{one: 4, other: 2} for one in (CONTEXT, EXPERT) for other in AXES if other != one]
    found += [{one: 8} for one in (CONTEXT, EXPERT)]
    return [mesh for mesh in found if mesh.keys() & {CONTEXT, EXPERT}]


ALWAYS = ("pipeline2-fsdp2-context2",)
"""Stages with a ring, of a decoder with experts; other axes: `test_central.py`. --full runs the others."""


def cases():
    """Each mesh with a ring, and of stages another kind, whose collectives are not those of pairs."""
    for mesh in meshes():
        kinds = ("ring", "all-gather") if mesh.keys() >= {PIPELINE, CONTEXT} else ("ring",)
        for kind in kinds:
            name = "-".join(f"{axis}{size}" for axis, size in mesh.items())
            name = name if kind == "ring" else f"{name}-{kind}"
            yield pytest.param(mesh, kind, id=name, marks=[] if name in ALWAYS else [pytest.mark.full])


def test_the_grid_has_what_it_says():
    assert len(meshes()) == 28
    assert set(ALWAYS) < {case.id for case in cases()}


@cache
def model():
    return from_nnx(MODEL)


@cache
def rows():
    random = np.random.default_rng(0)
    weights = np.ones(ROWS, np.float32)
    weights[-3:] = 0
    return {"tokens": random.integers(0, MODEL.vocab, (ROWS, MODEL.seq + 1), np.int32), "weights": weights}


def gradients(mesh, kind: ContextAttentions = "ring"):
    """Loss and gradients of two microbatches."""
    layout = Layout(mesh=mesh, context_attention=kind)
    return compute_gradients(model(), layout, rows(), 2, counts=(1, 1) if PIPELINE in mesh else ())


@cache
def one_device():
    return gradients({"data": 1})


@pytest.mark.parametrize(("mesh", "kind"), list(cases()))
def test_every_mesh_gives_the_step_of_one_device(mesh, kind, assert_same):
    assert_same(gradients(mesh, kind), one_device())
