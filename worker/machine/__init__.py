"""A machine of a person's own, lent to a manager's pool: `makara join`.

In: one lease at a time, from the manager that this machine was admitted to. Out: the agent of that VM as a
child process, and word of whether it runs. It keeps a key pair, by which the manager knows it again, and
wipes the VM's folder when the lease ends. It never powers the machine off.
"""
