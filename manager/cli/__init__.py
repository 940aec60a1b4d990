"""The command line: `makara`, which talks to a manager, and tries the user's code on the user's machine.

In: arguments, job files, answers of the API. Out: text, tables and pictures, and an exit status.
"""
