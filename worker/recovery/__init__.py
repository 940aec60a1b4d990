"""How what was committed outlives machines: checkpoints, and state from peers when a generation forms.

In: the parts that this worker hosts, what its peers and the store hold. Out: parts in the store; the state
that a new generation begins with, from the first rung of the ladder that has it all.
"""
