"""A job of 2.5 billion parameters and a spot market's trace, for `makara simulate`; see README.md."""
