"""The manager: the service that owns jobs, and the command line that talks to it.

In come job submissions, reports of agents, and word from providers. Out go orders to agents, VMs requested
and released, plans, an opened checkpoint head, and what users see. `spec` is what users ask for; `core`
decides, and nothing else does; `service` runs the loop, keeps the journal and carries out commands;
`providers` rent VMs, `boot` makes workers of them; `hosting` gives a manager a VM of its own and ends what
managers rented; `api` is what listens, `page` what it shows, `cli` what a user types; `replay` drives
the core through a trace in virtual time. Nothing here imports torch or runs a user's code.
"""
