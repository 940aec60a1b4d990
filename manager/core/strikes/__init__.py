"""Failures that may be forgiven: one ledger that counts them, and one table with a row for each kind.

`table.py` says for each kind how long its subject is left alone, what follows and what forgives; `ledger.py`
counts by it; `of_context.py` is what rules read and write of it; `page.py` prints the table into
docs/faults.md.
"""
