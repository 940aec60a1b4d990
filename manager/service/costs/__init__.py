"""What jobs cost, as users see it: so far, an hour, and at most; and before they begin."""
