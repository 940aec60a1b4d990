"""Keeps committed steps through losses of machines: checkpoints, and state from peers in a new generation.

In: the parts that this worker hosts, and the state of peers and store. Out: parts in the store; the state
with which a new generation begins, from peers if they hold every section, else from the store (`joining`),
and what it keeps of the step that a loss cut off (`kept_step`).
"""
