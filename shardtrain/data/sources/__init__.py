"""Registry of the formats of data files. To add one: CONTRIBUTING, "A format of data".

Next: `format.py` (definition of a format), `find.py` (finds files and recognises their formats).
"""

from shardtrain.data.sources import (
    array_record,
    columns,
    images,
    json_lines,
    megatron,
    numpy_tokens,
    tar,
    text,
    tf_record,
)
from shardtrain.data.sources.format import Format

FORMATS: dict[str, Format] = {
    "text": text.FORMAT,
    "jsonl": json_lines.FORMAT,
    "jsonl.gz": json_lines.GZIP,
    "jsonl.zst": json_lines.ZSTD,
    "parquet": columns.PARQUET,
    "arrow": columns.ARROW,
    "array_record": array_record.FORMAT,
    "tfrecord": tf_record.FORMAT,
    "tar": tar.FORMAT,
    "images": images.FORMAT,
    "npy": numpy_tokens.FORMAT,
    "megatron": megatron.FORMAT,
}
"""Name -> format; files are compared with formats in this order."""
