"""A user's machine, lent to a manager's pool: `makara join`.

In: one lease at a time, from the manager that admitted this machine. Out: that VM's agent as a child process,
and reports on it. The machine has a key pair, by which the manager recognises it, and wipes the VM's folder
when the lease ends. It is never powered off.
"""
