"""Managers on VMs of their own (`makara up`), and the end of what managers rented (`makara down`).

`record` is what is written down before a VM is asked for, and `launching` goes from there to a manager that
answers; `pairing` and `manager_boot` are the two sides of its first meeting, `payload` what is handed over,
`installing` and `founding` what the VM does with it. `accounts` are what each manager has at each cloud,
`ending` is its end, in the order that leaves nobody to rent again.
"""
