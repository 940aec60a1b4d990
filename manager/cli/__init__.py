"""The command line `makara`: talks to a manager, and checks the user's code on the user's machine.

In: arguments, job files, answers of the API. Out: text, tables and pictures, and an exit status.
"""
