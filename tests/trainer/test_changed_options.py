"""Options that may differ from those of the checkpoint, because no number depends on them."""

import shardtrain as st
from shardtrain.models.decoder import DecoderConfig
from shardtrain.trainer.changed_options import check_options
from shardtrain.trainer.config import Run, describe


def test_the_size_of_chunks_of_logits_may_change():
    model = DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=2)
    run = Run(model=model, data=st.Text(seq=8))
    now, notes = describe(run), []
    check_options(now, now, run, notes.append)
    assert notes == []
    check_options({**now, "model.loss_chunk": 64}, now, run, notes.append)
    assert [note.split(": ")[1] for note in notes] == ["model.loss_chunk"]
