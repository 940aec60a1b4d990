"""Sections on a device, and the arithmetic of a step: each its own autograd graph, the same bits anywhere.

In: `Sections`, samples, tensors that cross a cut. Out: outputs, gradients and their sums, and applied steps.
`runtime` is one section, `ranges` those that a worker hosts, `grad_sums` the two numerics, `grad_check`
whether a step can be applied, `state` what a section's state is in a checkpoint and when it moves to a peer.
Nothing here knows of other workers.
"""
