"""The HTTP side: the REST API, the agents' connections, the status page, and authorisation.

`app` puts it together; each other module has the routes of one resource, thin over `service`.
"""
