"""From words on the command line to a command and its options.

`parser.py` lists the commands and `commands.py` adds a command's options when it is used. `option_types.py`
reads values, `suggestions.py` answers mistakes with what was meant, and `entrypoint.py` looks for a job's
function without importing its code.
"""
