"""What was measured of a model and its hardware, as data: read, checked, put together.

In: times and sizes of sections, links and sums, from workers or from files. Out: a `Calibration` for one m,
or the `Measurements` that calibrations for any m are made of.
"""
