"""What a user of the stand-in of AWS may do: moto's own users, keys and policies, and its judgement of them.

moto judges actions alone. It asks about every call of EC2 with the resource `*`, and knows no value for any
condition; so what comes here is a policy without resources and conditions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from aws_stand import REGION, Aws
from makara.manager.providers.aws.sessions import new_session
from moto.core.exceptions import AccessDeniedError
from moto.iam.access_control import IAMRequest
from moto.iam.models import iam_backends

_USER = "manager"


class Rights:
    """Those of the one user of an account, whose keys `session` has."""

    def __init__(self, aws: Aws) -> None:
        self.asked: set[str] = set()  # what was asked for
        self.refused: set[str] = set()
        self._account = aws.account
        self._backend = iam_backends[aws.account]["aws"]
        self._backend.create_user(REGION, _USER)
        key = self._backend.create_access_key(_USER)
        self.session = new_session(
            aws_access_key_id=key.access_key_id,
            aws_secret_access_key=key.secret_access_key,
            region_name=REGION,
        )
        aws.allows = self._allows

    def grant(self, actions: Iterable[str]) -> None:
        """These, and no others."""
        statement = {"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        self._backend.put_user_policy(_USER, "manager", policy)

    def _allows(self, authorization: str, action: str, form: dict[str, str]) -> bool:
        asked = needed(authorization.split("/")[3], action, form)
        self.asked.update(asked)
        refused = [right for right in asked if not self._has(right, authorization)]
        self.refused.update(refused)
        return not refused

    def _has(self, right: str, authorization: str) -> bool:
        """As moto judges of a call by whoever signed this one."""
        service, _, action = right.partition(":")
        scope = authorization.split("/")
        scope[3] = service
        headers = {"Authorization": "/".join(scope)}
        try:
            IAMRequest(self._account, "POST", "/", {}, b"", headers, action).check_action_permitted("*")
        except AccessDeniedError:
            return False
        return True


def needed(service: str, action: str, form: dict[str, str]) -> list[str]:
    """The rights that a call asks for.

    What `RunInstances` needs besides is in EC2's user guide: "Grant permission to tag Amazon EC2 resources
    during creation", "IAM roles for Amazon EC2", "Service-linked role for EC2 Spot".
    """
    found = [f"{service}:{action}"]
    if action == "RunInstances":
        if "TagSpecification.1.ResourceType" in form:
            found.append("ec2:CreateTags")
        if "IamInstanceProfile.Name" in form:
            found.append("iam:PassRole")
        if form.get("InstanceMarketOptions.MarketType") == "spot":
            found.append("iam:CreateServiceLinkedRole")
    return found
