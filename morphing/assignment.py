"""The assignment problem: one to one, at the least cost."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cheapest(costs: Sequence[Sequence[int]]) -> list[int]:
    """For each row its column, each column taken once, so that the sum is least. `costs` is square.

    The Hungarian method (Kuhn 1955), with potentials: rows come one by one, each by the cheapest chain of
    rows that give up their column to the one before. Time in the cube of the rows' number.
    """
    size = len(costs)
    row_potential, column_potential = [0] * size, [0] * (size + 1)
    row_of: list[int | None] = [None] * (size + 1)  # by column; the one beyond the last is the newcomer's
    for newcomer in range(size):
        row_of[size] = newcomer
        cheapest_yet: list[float] = [math.inf] * size
        came_from, reached, column = [size] * size, list[int](), size
        left = dict.fromkeys(range(size))  # columns not reached yet, in order
        while (row := row_of[column]) is not None:
            reached.append(column)
            left.pop(column, None)
            for other in left:
                cost = costs[row][other] - row_potential[row] - column_potential[other]
                if cost < cheapest_yet[other]:
                    cheapest_yet[other], came_from[other] = cost, column
            column = min(left, key=cheapest_yet.__getitem__)
            step = int(cheapest_yet[column])
            for done in reached:
                taker = row_of[done]
                assert taker is not None, "a column is reached by way of its row"
                row_potential[taker] += step
                column_potential[done] -= step
            for other in left:
                cheapest_yet[other] -= step
        while column != size:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    columns = {row: column for column, row in enumerate(row_of[:size]) if row is not None}
    return [columns[row] for row in range(size)]
