"""Sections on a device, and the arithmetic of a step: each its own autograd graph, the same bits anywhere.

In: `Sections`, samples, what crosses a cut. Out: outputs, gradients and their sums, and applied steps.
`runtime` is one section, `ranges` those that a worker hosts, `sums` the two numerics, `verdict` whether a
step can be applied, `state` what a checkpoint or a peer takes of it. Nothing here knows of other workers.
"""
