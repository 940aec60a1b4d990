"""A model, measured on the machines that will train it (Varuna §4.3): what plans are simulated with.

In: a job's `Training` and settings. Out: `Measurements`, or a part of them where several workers share the
work. `section` measures one section, `subject` is the model traced and cut for one m at a time, `survey` what
one worker does first (what there is to measure, and as much of it as is quick), `wires` and `probe` links and
sums, `generation` what several do together, `shares` who measures which section. Without torch,
`makara.simulator.calibration.assembly` puts the parts together and `microbatch_size` beside it chooses m: the
manager does that too.
"""
