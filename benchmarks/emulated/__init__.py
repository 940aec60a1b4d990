"""An emulated device: models whose operations sleep, links that are slow, and everything else as it is.

In: models and networks in the sizes of real ones, and plans. Out: the seconds of real steps of real worker
processes. Executor, lanes, groups, sums, commit and optimizer are those that trainers run; operations are
asleep for their time, and tensors and link rates are `SCALE` times as large as what they stand for.
"""
