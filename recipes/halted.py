"""What is told where this node was halted for so long that the others gave it up.

Whoever is halted wakes to broken connections and silent peers, which are what came of it; the
others can only tell that nothing was heard of this node.
"""

from __future__ import annotations

from recipes.rendezvous import Failure


def blame(failure: Failure, node: int, halted: float, silence: float) -> Failure:
    """A failure as it is, or the halt that it came of.

    Args:
        failure: told on this node.
        halted: seconds for which this node was halted shortly before.
        silence: seconds after which the others give a node up.
    """
    out_of_contact = failure["type"] == "NoContact"  # and may come back under that name
    if halted <= silence or not (failure["consequence"] or out_of_contact):
        return failure
    return failure | {
        "node": node,
        "rank": None,
        "type": failure["type"] if out_of_contact else "NodeHalted",
        "message": f"node {node} was halted for {halted:.0f} s, and the others gave it up after "
        f"{silence:.0f} s",
        "remedy": "find out what halted it: SIGSTOP, a debugger, a suspended machine or container; "
        "deadlines.silence=… bears longer",
        "traceback": None,
        "consequence": False,
    }
