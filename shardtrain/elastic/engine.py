"""Events, which an engine sends to a member, and effects, which a member asks of it. Next: `member.py`.

The engine does effects in order. It has sockets, the run folder, and the program that computes gradients.
"""

from dataclasses import dataclass
from typing import Any

from shardtrain.elastic.epoch import Epoch, Peer
from shardtrain.elastic.messages import Message
from shardtrain.elastic.ring import OwnSum


@dataclass(frozen=True)
class Received:
    """A message of a peer; messages of one peer come in the order in which it sent them."""

    peer: str
    message: Message
    payload: Any = None


@dataclass(frozen=True)
class Lost:
    """The connection to a peer is lost, for good. `closed`: its process has ended, for sure."""

    peer: str
    closed: bool = False


@dataclass(frozen=True)
class Seen:
    """The folder has this epoch: the answer to `Look` and `Propose`, also if another island was first."""

    epoch: Epoch


@dataclass(frozen=True)
class Tick:
    """About a second passed. `idle_seconds`: time since any island showed in the folder that it is alive."""

    idle_seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """The newest valid checkpoint is of this step, or the run begins at 0: the answer to `FindCheckpoint`.

    batch: number of batches that the steps have read, if each reads one for each member.
    """

    step: int
    batch: int | None = None


@dataclass(frozen=True)
class StateReceived:
    """The state of a donor has arrived, with this number of steps applied."""

    peer: str
    step: int


@dataclass(frozen=True)
class Computed:
    """Slots of a step are computed. `own` is the sum over all slots of the step computed here so far.

    digest: of the parameters before the step, KIND/HASH, which members of one kind compare; "" compares none.
    """

    step: int
    slots: tuple[int, ...]
    own: OwnSum
    digest: str = ""


@dataclass(frozen=True)
class Applied:
    """An `Apply` of this step is done; needed only until the island is a member."""

    step: int


@dataclass(frozen=True)
class Written:
    """The last `Write` of a run is done, or has failed for good."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What this island wants: it happens after a step, to which all members agree.

    Args:
      saves: save a checkpoint.
      stops: end the run, with a checkpoint.
      leaves: leave the run, which the other members continue.
      deals: deal slots anew by measured speed.
      speed: the measured speed of this island from now on.
      excluded: members that must go now, because their numbers differ; all engines name the same ones.
    """

    saves: bool = False
    stops: bool = False
    leaves: bool = False
    deals: bool = False
    speed: int | None = None
    excluded: tuple[str, ...] = ()


Event = Received | Lost | Seen | Tick | Checkpoint | StateReceived | Computed | Applied | Written | Wish


@dataclass(frozen=True)
class Send:
    """Send a message; one to a lost peer is dropped."""

    peer: str
    message: Message
    payload: Any = None


@dataclass(frozen=True)
class Connect:
    """Have connections to exactly these peers; close others once what was sent is delivered."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class Look:
    """Read the newest epoch in the folder; `Seen` follows if it is this one or later."""

    number: int


@dataclass(frozen=True)
class Propose:
    """Make the file of this epoch by `link`, unless it exists; `Seen` follows with its content."""

    epoch: Epoch


@dataclass(frozen=True)
class Revoke:
    """Take over from the chiefs of earlier epochs: no save that they have begun may count after this."""

    number: int


@dataclass(frozen=True)
class FindCheckpoint:
    """Find the newest valid checkpoint; `Checkpoint` follows."""


@dataclass(frozen=True)
class Restore:
    """Restore the state from the checkpoint that was found; later checkpoints are void, and deleted."""

    step: int


@dataclass(frozen=True)
class SendState:
    """Send the state as it is now, with `step` steps applied; `StateReceived` follows at the peer."""

    peer: str
    step: int


@dataclass(frozen=True)
class Compute:
    """Add the gradients of these slots, in order, to the own sum of a step; `Computed` follows.

    batches: see `Epoch.find_batches`.
    """

    step: int
    slots: tuple[int, ...]
    batches: range | None = None


@dataclass(frozen=True)
class Apply:
    """Update the parameters by a whole sum (a `Sum`, or the payload of an `Update`) of a step of an epoch."""

    step: int
    epoch: int
    total: Any


@dataclass(frozen=True)
class Write:
    """Save a checkpoint of the state as it is now; commit it only under the number of `Member.fence`.

    A chief that sleeps between this look and the commit has been revoked if another one has taken over.

    is_last: the run ends with it; `Written` follows.
    """

    step: int
    is_last: bool = False


@dataclass(frozen=True)
class Note:
    """Show a line to the user."""

    text: str


@dataclass(frozen=True)
class Over:
    """This island is no member any more.

    outcome: `stopped` (the run ends), `left` (as it wished), `excluded` (by the others, it may join again),
    `cut off` (it may try to join again), `no state` (all that had it are lost), `too few` (members).
    """

    outcome: str


Effect = (
    Send
    | Connect
    | Look
    | Propose
    | Revoke
    | FindCheckpoint
    | Restore
    | SendState
    | Compute
    | Apply
    | Write
    | Note
    | Over
)
