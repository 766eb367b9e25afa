"""Windows whose documents do not see each other: each token has the number of its document in the window.

Windows are those of `windows.py`, full to the last token; a document that a border cuts is continued in the
next window as one of its own. Next: `functional/loss.py`, which gives the segments to the model.
"""

from dataclasses import dataclass

import numpy as np

from shardtrain.data.windows import Windows


@dataclass(frozen=True, kw_only=True)
class PackedWindows:
    """A random-access source: windows with the segments of their documents.

    Args:
      windows: the windows, of tokens with the ends of documents.

    Raises:
      ValueError: a file does not say where its documents end.
    """

    windows: Windows

    def __post_init__(self) -> None:
        if path := self.windows.shards.without_ends:
            raise ValueError(
                f"packing is 'separate', and {path} does not say where documents end (a .ends file beside it"
                " does); make the tokens by shardtrain data tokenize, or use --data.packing joined"
            )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`.

        Returns:
          {"tokens": int32 (seq + 1,), "segments": int32 (seq,), the number of the document of each input in
          this window, from 0; "weights": float32 (seq,), 0 where the target is of the next document}
        """
        sample, seq = self.windows[index], self.windows.seq
        begin = self.windows.start + index * seq
        # a document ends before these inputs; the target before is the first token of the next one
        ends = self.windows.shards.ends_in(begin + 1, begin + seq + 1) - begin
        starts, weights = np.zeros(seq + 1, np.int32), np.ones(seq, np.float32)
        starts[ends], weights[ends - 1] = 1, 0
        return {**sample, "segments": np.cumsum(starts[:-1], dtype=np.int32), "weights": weights}

    @property
    def num_skipped(self) -> int | None:
        """How many documents were left out of the tokens, see `Windows`."""
        return self.windows.num_skipped

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the windows, and that they are packed."""
        return f"{self.windows.fingerprint} separate"
