"""The job file: its fields, reading it, and its faults by line and field. Begin with `job_spec`."""
