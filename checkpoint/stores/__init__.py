"""Object stores: a local folder, S3 and Azure Blob Storage behind one protocol (`store.Store`).

`places.open_store` finds the store of an address; `store.retrying` retries while it is unavailable.
"""
