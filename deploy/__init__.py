"""How Makara gets onto machines: files for other programs, no logic.

In: nothing. Out: the unit by which systemd keeps a manager running. Cloud-init templates, container images
and the compose file join it together with the cloud providers that need them.
"""
