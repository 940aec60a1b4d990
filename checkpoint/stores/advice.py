"""Hints for a user whose store cannot be used, appended to the store's own message."""

from __future__ import annotations

import errno

_SPACE = "; free space there, or lower checkpoint.keep_latest_k"
_FOLDER_RIGHTS = "; give the user that this process runs as the right to read and write there"
_KEY_RIGHTS = "; give these keys the right to read, write, list and delete below checkpoint.uri"
_AZURE_RIGHTS = (
    "; give this key, signature or identity the right to read, write, list and delete in the container "
    "(role: Storage Blob Data Contributor)"
)
_NETWORK = "; look at checkpoint.endpoint and at the network between here and there"

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL_CODES = ("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull")


def about_file(error: OSError) -> str:
    """For a folder on a disk."""
    if error.errno in _FULL:
        return _SPACE
    return _FOLDER_RIGHTS if error.errno in _DENIED else ""


def about_answer(code: str, status: int) -> str:
    """For an S3 service's answer."""
    if status == 507 or code in _FULL_CODES:
        return _SPACE
    return _KEY_RIGHTS if status == 403 and code == "AccessDenied" else ""


def about_azure(code: str, status: int) -> str:
    """For an answer of Azure Blob Storage."""
    return _AZURE_RIGHTS if status == 403 and code.startswith("Authorization") else ""


def about_connection() -> str:
    """For a service that does not answer."""
    return _NETWORK
