"""A traced graph as a chain of sections 0..K-1.

In: a `TracedModel`, the price of each operation. Out: `Sections`: what each section takes, gives and hosts.
`cuts` finds the places that little crosses and balances the work between them; `derived` makes again in a
section what is cheaper to recompute than to send; `chain` says what sections are.
"""
