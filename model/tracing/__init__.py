"""Traces the user's model into one static graph of ATen operations.

In: a `Training` (a model's factory, a sample). Out: a `TracedModel`: the graph, with parameters, buffers and
entries of a sample as inputs and new values of buffers as outputs, and how each tensor is initialised from
the seed. The model, built with fake tensors (`makara.model.initialisation`), is exported under guards. What
torch.export would drop or bake in is rewritten (updates, constants, in-place operations, copies, regions) or
refused with the user's line.
"""
