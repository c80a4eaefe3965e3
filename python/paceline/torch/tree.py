"""The fixed binary tree over the shards of a batch, in whose order their gradients are added: that of ``crates/collective/src/tree.rs``.

A node over several shards gives the largest power of two below their number to its left child. Ranks own neighbouring shards. Each adds what
lies wholly in its own range, which leaves it with some nodes, its blocks, and the sum over all ranks goes on along the same tree.
"""


def deal(total, parts, index):
    """The range of ``total`` things that part ``index`` gets; the first parts get one more."""
    each, more = divmod(total, parts)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


def blocks(node, own):
    """The largest nodes in or below ``node`` that lie wholly in the range ``own``, from left to right."""
    if node.start >= own.stop or node.stop <= own.start:
        return []
    if own.start <= node.start and node.stop <= own.stop:
        return [node]
    left, right = _children(node)
    return blocks(left, own) + blocks(right, own)


def merges(node):
    """For each shard of a node: how often the two newest sums are added once its own has come."""
    if len(node) == 1:
        return [0]
    left, right = _children(node)
    counts = merges(left) + merges(right)
    counts[-1] += 1
    return counts


def fold(node, sums, add):
    """The sum over a node, from those of nodes in it."""
    if node in sums:
        return sums[node]
    left, right = _children(node)
    return add(fold(left, sums, add), fold(right, sums, add))


def _children(node):
    left = 1 << (len(node) - 1).bit_length() - 1
    return range(node.start, node.start + left), range(node.start + left, node.stop)
