"""The manager: the service that owns jobs, and the command line that talks to it.

In come job submissions, reports of agents, and word from providers. Out go orders to agents, VMs requested
and released, plans, an opened checkpoint head, and what users see. Decisions are made in `core` and nowhere
else; the `journal` holds them; `service` runs the loop, `effects` carries out commands, `api`, `agents` and
`site` are what listens, `tokens` and `auth` say who may. Nothing here imports torch or runs a user's code.
"""
