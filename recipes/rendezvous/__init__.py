"""Where the nodes of a job meet: sealed lines of JSON over TCP, with a deadline on every wait.

The parent on node 0 runs a `Coordinator`; the parent on every node, node 0 included, is a `Member`.
Members exchange values (each gives one, all get all), tell that they are alive, and report
failures. The coordinator notices who is missing, who has gone silent, and which failure came first,
and tells everyone: so each node ends, and can say why.

Both ends of a connection prove that they know the job's secret before anything that the other says
counts (`authentication`); what is said after has a form and a bound (`messages`, `lines`).

`paddle.distributed.launch` has a rendezvous of its own, but that one waits without end and tells
no names; it starts once the nodes have met here.
"""

from recipes.rendezvous.alone import Alone
from recipes.rendezvous.coordinator import Coordinator
from recipes.rendezvous.failures import Failure, JobFailed, node_failure
from recipes.rendezvous.member import Member
from recipes.rendezvous.messages import MEET

DEFAULT_PORT = 6170

__all__ = [
    "DEFAULT_PORT",
    "MEET",
    "Alone",
    "Coordinator",
    "Failure",
    "JobFailed",
    "Member",
    "node_failure",
]
