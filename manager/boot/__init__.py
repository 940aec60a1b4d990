"""From a bare VM to a worker: what a cloud gives a VM at its birth, and what that VM then fetches.

In: an attempt, its boot file, and the checksums of what the manager serves. Out: user data for cloud-init
(`user_data`), the wheel of the worker's side and the versions to install (`payload`). `first_boot` and
`end_vm` are the scripts that the user data carries: each needs Python alone. `cloud_config` is what user data
of workers and managers have in common.
"""
