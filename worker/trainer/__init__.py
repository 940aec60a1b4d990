"""The process that trains, one for each device: `python -m makara.worker.trainer`.

In: orders, over the socket to its agent. Out: reports and metrics. `trainer` is its main loop, `generation`
runs one generation, `measurer` does the measuring before the first plan.
"""
