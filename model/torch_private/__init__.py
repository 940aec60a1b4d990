"""What Makara uses of torch that torch does not document: a module for each interface.

Elsewhere in `model/` and `worker/` nothing private of torch is named, but for three interfaces that have one
user each, who says so: gloo's process groups (`worker/execution/gloo.py`), autograd's engine
(`worker/sections/engine.py`) and the allocator's events (`worker/profiling/footprint.py`).

All are checked with torch 2.13, the only version that pyproject.toml allows: before another is allowed, look
at each module here and run the tests of exactness.
"""
