"""Views of jobs for users: projections of their state and of the newest reports, as the API sends them."""
