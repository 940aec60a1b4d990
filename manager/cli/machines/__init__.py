"""Machines of a person's own: `makara join` on each of them, and `makara machines`, which lists them."""
