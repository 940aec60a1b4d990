"""One worker's part of a step: its operations in the dispatcher's order, tensors to and from its peers.

In: a plan's generation, the hosted sections. Out: committed steps. `stepper` runs a step from the first
forward to the commit (`commit`); `executor` runs operations, `p2p_channels` carry activations and gradients,
`reduction` sums gradients; `in_flight` keeps what was added to a step until its commit; `session` has the
generation's groups, `blocking` the interrupt that wakes the compute thread. `costs` measures the overhead of
all this.
"""
