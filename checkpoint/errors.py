"""Everything that can go wrong with checkpoints.

CheckpointError
├── StoreUnavailable   the store does not answer now: worth trying again (`makara.checkpoint.retrying`)
├── StoreRefused       the store answers no: address, credentials, bucket, permission (a user's mistake)
│   └── NoCredentials  nobody gave any, and this machine has none
├── InvalidKey         a key that no store accepts
├── NotFound           no object under that key
├── Conflict           a compare-and-swap lost: the object is not the one that was read
├── Corrupt            an object is there and is not what was written: torn, truncated, altered
├── Incomplete         parts are missing, or contradict one another
├── HeadMissing        there is no head that can be read, though there should be
├── HeadLacks          the head has not the generation or the checkpoints that it should have
├── HeadAhead          somebody else has opened the head: it has what its opener does not know of
├── Fenced             a newer generation is open: this writer is of the past and must stop
├── Superseded         its generation has published a later step: this one is not wanted any more
├── Retained           the checkpoint may not be deleted (base of the open generation, the only one, listed)
├── NoReadable         none of the candidate checkpoints can be read
└── Cancelled          the caller's event was set while waiting to try again
"""

from __future__ import annotations


class CheckpointError(Exception):
    """The root of this package's errors."""


class StoreUnavailable(CheckpointError):
    """Transient: no connection, a time-out, a 5xx answer, a full disk, a lock that is held too long."""


class StoreRefused(CheckpointError, ValueError):
    """Trying again cannot help; the message names the URI and what the store said."""


class NoCredentials(StoreRefused):
    """No keys were given for this store, and none are found where this process runs."""


class InvalidKey(CheckpointError, ValueError):
    """A key with empty, hidden or `..` segments, or with characters outside `[A-Za-z0-9._=-]`."""


class NotFound(CheckpointError):
    """No object under this key."""


class Conflict(CheckpointError):
    """The object changed (or appeared, or vanished) since it was read."""


class Corrupt(CheckpointError):
    """An object that exists and is not what its writer wrote; the message names the key."""


class Incomplete(CheckpointError):
    """A checkpoint whose parts do not make up all its sections; the message names those missing."""


class Fenced(CheckpointError):
    """The head belongs to a newer generation, `open_generation`."""

    def __init__(self, generation: int, open_generation: int) -> None:
        super().__init__(f"generation {generation} is fenced: generation {open_generation} is open")
        self.generation = generation
        self.open_generation = open_generation


class HeadMissing(CheckpointError):
    """No head, or none that can be read, where one must be; the message says what is known of it."""


class HeadLacks(CheckpointError):
    """A head that was set back: the message names what is missing."""


class HeadAhead(CheckpointError):
    """A head that has gone on without whoever wants to open it."""


class Superseded(CheckpointError):
    """A later step of its generation was published: what is stored of this one may be gone already."""


class Retained(CheckpointError):
    """A checkpoint that must be kept, and why."""


class NoReadable(CheckpointError):
    """No candidate checkpoint could be read; the message says why for each."""


class Cancelled(CheckpointError):
    """Stopped by the caller while waiting to try again."""
