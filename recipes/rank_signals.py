"""Which signals the launcher and the ranks of a parent heed: those of their own launcher.

A batch system, systemd or a container's end sends its signal to every process of a job at once.
What it means is the parent's decision, and the parent needs its ranks until they have saved. So the
launcher and all that it starts begin with these signals blocked. The launcher's SIGTERM, with which
it ends the other ranks after a failure, is told from those of others by its sender.
"""

from __future__ import annotations

import os
import signal
import threading

from recipes.ending import POLITE


def block() -> None:
    """In the launcher, before it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)


def unblock() -> None:
    """In a process of a rank that has handlers of its own."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)


def heed_launcher() -> None:
    """In a rank: end by the launcher's SIGTERM; before other threads are started, which would
    otherwise not have the signals blocked."""
    block()
    threading.Thread(
        target=_wait_for, args=(os.getppid(),), name="launcher's signal", daemon=True
    ).start()


def _wait_for(launcher: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != launcher:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
