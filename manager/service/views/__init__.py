"""Views of jobs for users, as the API sends them.

In: a job's state, its history and the newest reports. Out: pydantic models, a module for each thing that is
shown. Nothing here changes or waits for anything.
"""
