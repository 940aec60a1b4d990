"""The errors of this package.

CheckpointError
├── StoreUnavailable   the store does not answer now: retry (`makara.checkpoint.retrying`)
├── StoreRefused       the store refuses: address, credentials, bucket, permission (a user's mistake)
│   └── NoCredentials  none were given, and this machine has none
├── InvalidKey         a key that no store accepts
├── NotFound           no object under that key
├── Conflict           a compare-and-swap lost: the object is not the one that was read
├── Corrupt            an object is not what was written: torn, truncated, altered
│   └── HeadCorrupt    the head
├── Incomplete         parts are missing, or contradict one another
├── HeadMissing        no readable head where there must be one
├── HeadLacks          the head lacks a generation or checkpoints that the caller knows of
├── HeadAhead          somebody else opened the head: it has entries that the caller does not know of
├── Fenced             a newer generation is open: this writer must stop
├── Superseded         the generation has published a later step: this one is not needed any more
├── Retained           the checkpoint may not be deleted (base of the open generation, the only one, listed)
├── NoReadable         none of the candidate checkpoints can be read
└── Cancelled          the caller's event was set while waiting to retry
"""

from __future__ import annotations


class CheckpointError(Exception):
    """The root of this package's errors."""


class StoreUnavailable(CheckpointError):
    """Transient: no connection, a time-out, a 5xx answer, a full disk, a lock that is held too long."""


class StoreRefused(CheckpointError, ValueError):
    """Retrying cannot help; the message names the URI and what the store said."""


class NoCredentials(StoreRefused):
    """No keys were given for this store, and none are found in this process's environment."""


class InvalidKey(CheckpointError, ValueError):
    """A key with empty, hidden or `..` segments, or with characters outside `[A-Za-z0-9._=-]`."""


class NotFound(CheckpointError):
    """No object under this key."""


class Conflict(CheckpointError):
    """The object changed (or appeared, or vanished) since it was read."""


class Corrupt(CheckpointError):
    """An object that exists and is not what its writer wrote; the message names the key."""


class HeadCorrupt(Corrupt):
    """An unreadable head: which checkpoints exist is not known."""


class Incomplete(CheckpointError):
    """A checkpoint that lacks parts of its sections; the message names the missing ones."""


class Fenced(CheckpointError):
    """The head belongs to a newer generation, `open_generation`."""

    def __init__(self, generation: int, open_generation: int) -> None:
        super().__init__(f"generation {generation} is fenced: generation {open_generation} is open")
        self.generation = generation
        self.open_generation = open_generation


class HeadMissing(CheckpointError):
    """No readable head where there must be one; the message says what is known of it."""


class HeadLacks(CheckpointError):
    """A head that was set back: the message names what is missing."""


class HeadAhead(CheckpointError):
    """A head that has entries unknown to the caller that wants to open it."""


class Superseded(CheckpointError):
    """A later step of its generation was published; this one's objects may be deleted already."""


class Retained(CheckpointError):
    """A checkpoint that may not be deleted; the message says why."""


class NoReadable(CheckpointError):
    """No candidate checkpoint could be read; the message says why for each."""


class Cancelled(CheckpointError):
    """Stopped by the caller while waiting to retry."""
