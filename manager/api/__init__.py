"""What listens: the REST API, the agents' connections, the status page, and who may do what."""
