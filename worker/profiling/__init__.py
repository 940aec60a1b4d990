"""A model, measured on the machines that will train it (Varuna §4.3): what plans are simulated with.

In: a job's `Training` and settings. Out: `Measurements`, or a part of them where several workers share the
work. `section` measures one section, `subject` is the model traced and cut for one m at a time, `survey` what
one worker does first (what there is to measure, and as much of it as is quick), `wires` and `probe` links and
sums, `generation` what several do together. `makara.simulator.calibration.assembly` puts the parts together,
without torch: the manager does it too.
"""
