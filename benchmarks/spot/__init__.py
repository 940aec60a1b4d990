"""A spot market of a few minutes, played to a real manager with real trainers, and replayed.

In: a seeded market, a job whose operations sleep, and a policy. Out: what was done in a window of time, as
measured and as a replay says that is given the calibration and the costs of the same run.
"""
