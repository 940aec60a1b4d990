"""Measurements of a model and its hardware as data: reads, checks and assembles them.

In: times and sizes of sections, links and all-reduces, from workers or from files. Out: a `Calibration` for
one m, or `Measurements`, which hold one for each measured m. `worker.profiling` does the measuring.
"""
