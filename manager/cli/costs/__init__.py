"""Costs on a terminal: of jobs that there are, and the question that is asked before one is submitted."""
