"""The effects around the core: the loop of each job, the journal, the store's commands, plans, and views.

In: events from the API, agents and providers. Out: facts in the journal, commands carried out, orders, and
views for users. `core` makes all decisions. Begin with `service`, then `job_loop` and `effects`.
"""
