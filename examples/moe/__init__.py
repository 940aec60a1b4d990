"""An example job: a transformer whose feed-forward layers are mixtures of experts."""
