"""Managers on VMs of their own (`makara up`), and deleting what managers rented (`makara down`).

`record` is written before a VM is requested, and `launching` goes from there to a manager that answers;
`pairing` and `manager_boot` are the two sides of its first connection, `payload` is what is sent over it,
`installing` and `founding` run on the VM. `accounts` are what each manager has at each cloud; `ending`
deletes that.
"""
