"""Having nothing left of what managers rented: `makara down`.

In: for each manager and cloud an `Account`, which opens a provider that sees what carries that manager's tag.
Out: what there is and costs, and its end, in the order that leaves nobody to rent again.
"""
