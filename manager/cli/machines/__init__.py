"""Machines that users lend: `makara join` on each of them, and `makara machines`, which lists them."""
