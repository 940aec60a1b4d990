"""The manager: the service that owns jobs, and the command line that talks to it.

In: job submissions, reports of agents, answers of providers. Out: orders to agents, requests and releases of
VMs, plans, the checkpoint head, and what users see. `spec` is the job file; `core` makes all decisions, one
rule a module in `core/rules`; `service` runs the loop, keeps the journal and carries out commands;
`providers` rent VMs (a new cloud goes there), `boot` turns them into workers; `hosting` runs a manager on a
VM of its own and ends what managers rented; `api` is HTTP, `page` the status page, `cli` the command line;
`world` simulates what is around the core in virtual time, `replay` drives it by a trace. Nothing here imports
torch or runs a user's code.
"""
