"""Calibrations on a terminal: measured here or fetched from a manager, then printed, drawn, written."""
