"""The process that trains, one for each device: `python -m makara.worker.trainer`.

In: orders, over the socket to its agent. Out: reports and metrics. `trainer` leads it, `generation` from plan
to plan, `measurer` through what is to be measured before the first plan.
"""
