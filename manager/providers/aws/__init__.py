"""AWS: each VM is an EC2 instance, requested by one `run_instances` call.

In: attempts and settings (`clouds.yaml`, section aws). Out: instances whose tags name their manager and VM,
prices, and faults of requests. All state is at AWS, except that `memory` notes which changes AWS's lists may
not show yet.
"""

from .provider import AwsProvider

__all__ = ["AwsProvider"]
