"""`makara up` starts a manager on a VM of its own; `makara down` deletes all that managers rented."""
