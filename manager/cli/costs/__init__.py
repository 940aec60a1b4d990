"""Costs on a terminal: of existing jobs, and the confirmation before one is submitted."""
