"""From a user's module to sections.

In: the user's `Training`: the factory of a model, its data, loss and optimizer. `tracing` makes one static
graph of it, `partition` a chain of sections, `data` and `seeds` say which samples and which random numbers
each micro-batch has. Knows nothing of plans, workers or the manager.
"""
