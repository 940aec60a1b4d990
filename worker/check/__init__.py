"""The differential dry run: one step of the user's module as it is against one step in pieces.

Varuna §5.2 lists what ties the parts of a model together outside its graph: norms over all parameters, loss
scaling, state in libraries. Whatever of it there is makes the two steps differ. In: a `Training` and its
chain of sections. Out: a `Report`: what was compared, the largest differences, and findings that name the
parameter, buffer, optimizer or call that differs and what to declare or change.
"""
