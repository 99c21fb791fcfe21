"""Checks of the nodes before a run: what differs between them, and what each lacks.

Every node gathers its facts (`gather`), all exchange them, each tries the others' ports (`look`),
and all nodes compare the same facts (`compare`), so that they come to the same end. Nothing here
imports Paddle in the parent process: what only Paddle can tell comes from a short-lived process
(`python -m recipes.preflight`).
"""

from recipes.preflight.checks import Cluster, Finding, compare
from recipes.preflight.facts import Facts, gather
from recipes.preflight.ports import View, listening, look
from recipes.preflight.report import refuse_errors, show

# Seconds that a node waits for what another one gathers or tries after its own `deadlines.start`.
MARGIN = 10.0

__all__ = [
    "MARGIN",
    "Cluster",
    "Facts",
    "Finding",
    "View",
    "compare",
    "gather",
    "listening",
    "look",
    "refuse_errors",
    "show",
]
