"""Costs of jobs for users: so far, per hour, and at most; and quotes before they begin."""
