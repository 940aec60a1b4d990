"""From a user's module to sections.

In: the user's `Training`: factories of model, data, loss and optimizer. `initialisation` builds the model
without memory, `tracing` turns it into one static graph, `partition` splits that into a chain of sections,
`data` and `seeds` define the samples and the random numbers of each micro-batch. Knows nothing of plans,
workers or the manager.
"""
