"""Notices: how a VM learns that its cloud will take it away.

One watcher on each VM asks the source that the boot file names: a file (local VMs), or the metadata service
of AWS or Azure. In: what the cloud says, and SIGTERM where the boot file takes it for a notice. Out: the
notice that stands, whether the VM is at risk, and word to the cloud once the VM has handed over. What cannot
be asked changes nothing: only a source that answers withdraws a notice.
"""

from .file import NOTICE_FILE, FileSource
from .notice import Notice, Reading, Source, Unanswered
from .watcher import NoticeWatcher, watcher_of

__all__ = [
    "NOTICE_FILE",
    "FileSource",
    "Notice",
    "NoticeWatcher",
    "Reading",
    "Source",
    "Unanswered",
    "watcher_of",
]
