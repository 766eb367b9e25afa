"""The vocabulary: names of mesh axes and of array dims. Plain strings, no jax.

An *axis* belongs to the mesh, a *dim* to an array, in every name, document and message.
A model names the dims of its arrays with these words; `sharding/layout.py` gives each dim its axes.
"""

PIPELINE = "pipeline"
DATA = "data"
FSDP = "fsdp"
EXPERT = "expert"
CONTEXT = "context"
TENSOR = "tensor"

AXES = (PIPELINE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)
"""Every mesh axis, slowest link first. A mesh has all of them; most have size 1."""

BATCH = "batch"
SEQ = "seq"
RESIDUAL_SEQ = "residual_seq"
EMBED = "embed"
HEADS = "heads"
KV_HEADS = "kv_heads"
HEAD_DIM = "head_dim"
MLP = "mlp"
VOCAB = "vocab"
LAYERS = "layers"
EXPERTS = "experts"
SEGMENTS = "segments"
HEIGHT = "height"
WIDTH = "width"
CHANNELS_IN = "channels_in"
CHANNELS_OUT = "channels_out"

DIMS = {
    BATCH: "examples (B)",
    SEQ: "positions of a sequence (T; S for keys), sharded over context alone",
    RESIDUAL_SEQ: "positions of a sequence between blocks, where they may be sharded over tensor too",
    EMBED: "features of the residual stream (D)",
    HEADS: "query heads (H)",
    KV_HEADS: "key and value heads of grouped-query attention",
    HEAD_DIM: "features of one head (K)",
    MLP: "hidden features of a feed-forward block (F)",
    VOCAB: "tokens of the vocabulary, or classes (V)",
    LAYERS: "stacked blocks that a scan iterates over",
    EXPERTS: "experts of a mixture (E)",
    SEGMENTS: "token types: the first or the second text of a pair",
    HEIGHT: "rows of an image or of a convolution window",
    WIDTH: "columns of an image or of a convolution window",
    CHANNELS_IN: "features that a convolution reads",
    CHANNELS_OUT: "features that a convolution writes",
}
"""The glossary: dim name -> what it counts, with its suffix letter in names of arrays.

Suffix letters name logical dims, never a layout: `q_BTHK` has dims batch, seq, heads, head_dim.
Two more letters name no dim of a model: M microbatches, P stages.
"""
