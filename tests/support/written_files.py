"""What cloud-init would write of user data."""

from __future__ import annotations

import base64
import gzip

import yaml


def files_in(user_data: bytes) -> dict[str, str]:
    """By path, the text of each file."""
    listed = yaml.safe_load(user_data)["write_files"]
    return {one["path"]: gzip.decompress(base64.b64decode(one["content"])).decode() for one in listed}
