"""Sessions of boto3 that share what botocore knows of AWS."""

from __future__ import annotations

import functools
from typing import Any

import boto3
import botocore.session


def new_session(**given: str) -> boto3.Session:
    """A session with what is given, under `boto3.Session`'s names, else with the credentials and the profile
    of this process's environment. Raises botocore's `ProfileNotFound`."""
    core = botocore.session.get_session()
    core.get_scoped_config()  # looks the profile up
    core.register_component("data_loader", _service_models())
    return boto3.Session(botocore_session=core, **given)


@functools.cache
def _service_models() -> Any:
    """botocore's models of the services: read once, as that of EC2 takes a quarter of a second."""
    return botocore.session.get_session().get_component("data_loader")
