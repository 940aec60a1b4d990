"""The user's model as one static graph of ATen operations.

In: what `Training` gives (a model's factory, a sample). Out: a `TracedModel`: the graph, with parameters,
buffers and entries of a sample as inputs and new values of buffers as outputs, and how each tensor is made
from the seed. The model is built with fake tensors and exported under guards; what a trace would drop or
bake in is made right (updates, constants, in-place operations, regions) or refused with the user's line.
"""
