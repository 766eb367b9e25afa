"""Options that may differ from those of the checkpoint, and one that may not go back."""

from typing import Literal

import pytest

import shardtrain as st
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.lora import Lora
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.resume import check_options, check_synchronous_steps


def test_the_size_of_chunks_of_logits_may_change():
    model = DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=2)
    run = Run(model=model, data=st.Text(seq=8))
    now, notes = describe(run), []
    check_options(now, now, run, notes.append)
    assert notes == []
    check_options({**now, "model.loss_chunk": 64}, now, run, notes.append)
    assert [note.split(": ")[1] for note in notes] == ["model.loss_chunk"]


def test_texts_of_earlier_versions_are_compared_by_their_values():
    """They were saved as they were given, and an empty one for None."""
    model = DecoderConfig(
        vocab=8, seq=8, embed=8, num_layers=1, num_heads=2, lora=Lora(rank=2, on=("q", "v"))
    )
    run, notes = Run(model=model, data=st.Text(seq=8)), []
    saved = {**describe(run), "model.experts": "", "model.rope_scaling": ""}
    assert saved["model.lora"] == "rank=2,on=q+v"
    check_options({**saved, "model.lora": "on=q+v,alpha=16,rank=2"}, describe(run), run, notes.append)
    assert notes == []
    with pytest.raises(ValueError, match=r"model.lora: 'rank=4,on=q\+v' -> 'rank=2,on=q\+v'; put it back"):
        check_options({**saved, "model.lora": "rank=4,on=q+v"}, describe(run), run, notes.append)


def test_synchronous_steps_do_not_come_back_after_local_ones():
    """Each replica has a state of its own optimizer by then, so that one gradient is not one update."""

    def run(number, on: Literal["gradients", "deltas"] = "deltas"):
        every = 4 if on == "deltas" else 1
        way = Synchronisation(on=on, every=every, synchronous_steps=number)
        return Run(
            model=DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=2),
            data=st.Text(seq=8),
            strategy=st.Strategy(synchronisation=way),
        )

    text = r"synchronous_steps is 20, .* step 3 .* after 1 were local: .* Use --synchronous-steps 3 or fewer"
    with pytest.raises(ValueError, match=text):
        check_synchronous_steps(describe(run(1)), run(20), 3)
    for before, asked, step in ((1, 3, 3), (5, 20, 3), (3, 20, 3), (20, 0, 3)):
        check_synchronous_steps(describe(run(before)), run(asked), step)
    check_synchronous_steps(describe(run(0, on="gradients")), run(20), 3)
