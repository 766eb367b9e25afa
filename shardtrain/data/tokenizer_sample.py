"""A sample of a corpus to train a tokenizer on: the first documents of each file, as much text of each."""

from collections.abc import Iterator, Sequence

from shardtrain.data.documents import OnError, Piece, texts
from shardtrain.data.sources.find import SourceFile
from shardtrain.data.sources.format import BadData


def sample_texts(
    files: Sequence[SourceFile], field: str, num_bytes: int, on_error: OnError = "stop"
) -> Iterator[str]:
    """Yield documents of files until each has given its part of so many bytes.

    Args:
      files: of formats with rows.
      field: the field with the text.
      num_bytes: of all documents, about: what a file lacks is taken from later ones.
      on_error: "stop" raises the error of a row; "skip" leaves it out.

    Raises:
      BadData: a row cannot be read.
    """
    left = num_bytes
    for number, file in enumerate(files):
        quota = left // (len(files) - number)
        for _, text in texts(Piece(str(file.path), file.format), field, None):
            if quota <= 0:
                break
            if isinstance(text, BadData):
                if on_error == "stop":
                    raise text
                continue
            yield text
            size = len(text.encode())
            quota, left = quota - size, left - size
