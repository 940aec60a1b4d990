"""Builds the user's model with fake tensors, and makes any one of its tensors later.

In: a model's factory. Out: the model, and a `Recording` of the operations that its tensors come from: initial
values follow from the seed, or are read from the files that the factory loads.
"""
