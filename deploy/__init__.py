"""How Makara gets onto machines: files for other programs, no logic.

In: nothing. Out: the units by which systemd keeps a manager running, and a rented VM's agent.
"""
