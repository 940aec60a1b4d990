"""A trainer whose local store is as slow as a distant one: a checkpoint is on its way while it trains on."""

from __future__ import annotations

import os
import time

from makara.checkpoint.stores.local import LocalStore
from makara.worker.trainer import trainer

SECONDS = float(os.environ["MAKARA_BENCHMARK_PUT_S"])  # for each part of a section

_put = LocalStore.put


def put(self: LocalStore, key: str, data: bytes) -> None:
    time.sleep(SECONDS)
    _put(self, key, data)


if __name__ == "__main__":
    LocalStore.put = put
    trainer.main()
