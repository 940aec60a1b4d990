"""One worker's part of a step: its operations in the dispatcher's order, tensors to and from its peers.

In: a plan's generation, the sections that are hosted. Out: committed steps. `stepper` is a step from the
first forward to the commit; `executor` runs operations, `lanes` carry activations and gradients,
`reduction` the sums; `session` is the generation's groups, `interrupt` what wakes everyone who waits. `costs`
measures what all this adds to the time of the sections.
"""
