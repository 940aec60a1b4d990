"""The names of `user_models.ZOO`, as parameters of tests."""

from __future__ import annotations

import pytest
from user_models import ZOO

# Each has a relation among the others, made of the same layers.
_SOAKED = ("bert", "vit", "plain_cnn", "vgg16", "densenet", "dlrm")
ZOO_NAMES = [pytest.param(name, marks=pytest.mark.soak) if name in _SOAKED else name for name in ZOO]
