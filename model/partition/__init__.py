"""Partitions a traced graph into a chain of sections 0..K-1.

In: a `TracedModel`, the price of each operation. Out: `Sections`: inputs, outputs and parameters of each.
`cuts` finds places that few bytes cross and balances the work between them; `rematerialized` finds values
that are cheaper to recompute than to send; `partitioned_model` has the data types.
"""
