"""Which CTA of a packed product multiplies which x by which rows of the adapter's a (nvfp4_shrink.cu).

The CTAs share the product's units evenly, in order: unit u is CTA ((u + 1) * parts - 1) // units's. The same
piece of x is in every `period`-th unit's stage; there each slice of it must meet each 16 rows of a once.
"""


def low_rank_plan(units: int, parts: int, period: int, slices: int, row_groups: int) -> list[int]:
    """Early units, evenly shared. An item is 256 * the CTA's unit + 32 * its stage's slice + the 16 rows.

    For each CTA its first item or -1, where its others begin and end, 0; then those others.
    """
    items_P: list[list[int]] = [[] for _ in range(parts)]
    for x_piece in range(period):
        owners = ((unit, ((unit + 1) * parts - 1) // units) for unit in range(x_piece, units, period))
        early = sorted((unit - units * owner // parts, owner) for unit, owner in owners)[:64]
        for item in range(slices * row_groups):
            piece, row_group = divmod(item, row_groups)
            place, owner = min(early, key=lambda each: each[0] + 2 * len(items_P[each[1]]))
            items_P[owner].append(256 * place + 32 * piece + row_group)
    plan, others = [], []
    for items in map(sorted, items_P):
        begin = 4 * parts + len(others)
        others += items[1:]
        plan += [items[0] if items else -1, begin, 4 * parts + len(others), 0]
    return plan + others
