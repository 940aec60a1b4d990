"""From a bare VM to a worker: the user data of a VM, and the software that it then fetches.

In: an attempt, its boot file, and the checksums of what the manager serves. Out: user data for cloud-init
(`user_data`), the wheel of the worker's side and the versions to install (`payload`). `first_boot` and
`end_vm` are scripts in the user data; they need only Python. `cloud_config` is common to user data of workers
and managers.
"""
