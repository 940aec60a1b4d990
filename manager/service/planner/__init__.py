"""The planner of a running manager: who answers the core's questions for plans, and when.

In: `ComputePlan` and `ComputeGrowth`; out: their answers, from `service.planning`, computed in threads. In
its idle time it looks at what it may be asked next (`answers_ahead`), and keeps the answers (`answer_table`).
"""
