"""AWS: each VM is an EC2 instance of its own, asked for by one `run_instances` call.

In go attempts and settings (`clouds.yaml`, section aws); out come instances whose tags name their manager and
VM, prices, and what is wrong with a wish. Everything is asked of AWS: what is kept in memory is only
which answers may still be missing from its lists.
"""

from .provider import AwsProvider

__all__ = ["AwsProvider"]
