"""The parent of a run: lets the nodes meet, starts this node's ranks, and says how it ended.

It never imports Paddle for more than one process: `paddle.distributed.launch` starts the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes import (
    checkpoint,
    claim,
    data,
    earlier_run,
    ending,
    foresight,
    halted,
    home,
    interruption,
    launcher_environment,
    models,
    mounts,
    named_paths,
    network,
    preflight,
    processes,
    pulse,
    scheduler,
    telemetry,
    thread_variables,
    worker,
)
from recipes.config import Config, UserError, dump
from recipes.ending import Interrupted, Overdue, Watch
from recipes.introductions import Arrival, Offer, facts_received, of_all, view_received
from recipes.printable import printable_lines
from recipes.progress import NoDisplay, StepDisplay, TellingDisplay, TerminalDisplay
from recipes.pulse import Halts, OwnPulse
from recipes.ranks import Meeting, Ranks
from recipes.rendezvous import (
    DEFAULT_PORT,
    MEET,
    Alone,
    Coordinator,
    Failure,
    JobFailed,
    Member,
    node_failure,
    secret,
)
from recipes.rendezvous.secret import Secret
from recipes.topology import NodeIdentity, Place, find_node

# A day: the end of other nodes' ranks is awaited for as long as those nodes are alive.
_ENDED_SECONDS = 86400.0

_log = logging.getLogger(__name__)


def run(config: Config, folder: Path, watch: Watch, settings: Sequence[str]) -> int:
    """Run the configured task on all its ranks, again after a failure if ``restarts`` says so.

    Args:
        config: checked.
        folder: the run folder; on several nodes, its name on node 0 counts for all.
        watch: of this process, which has started.
        settings: the overrides that `config` was composed with.

    Returns:
        The exit status (docs/endings.md).

    Raises:
        UserError: the run cannot start.
    """
    scheduler.refuse_several_processes(config, os.environ)
    thread_variables.check(config, os.environ)
    named_paths.check(config)
    foresight.check(config)
    identity = identify(config)
    telemetry.setup_logging(f"[node{identity.node}]")
    home.provide_folders()
    if identity.node == 0 and (lost := mounts.what_is_lost(config, folder)):
        _log.warning(lost)
    known = secret_of(config)
    job = Job(config, telemetry.RunFolder(folder), identity, watch, known, settings=settings)
    try:
        with watch.run(config.deadlines.grace, "ending", job.last_words), job.holding:
            return job.run()
    except Interrupted as interrupt:  # while it was ending by itself
        return ending.status_of(interrupt.number)
    finally:
        if watch.asked is not None:  # it may have interrupted the end of what was started
            processes.kill_all(lambda: processes.descendants(os.getpid()))


def identify(config: Config) -> NodeIdentity:
    """Which node this is.

    Raises:
        UserError: neither the configuration nor the environment tells; with the commands to run.
    """
    nodes = config.topology.nodes
    if nodes == 1:
        return NodeIdentity(0, "127.0.0.1", None)
    try:
        identity = find_node(config.topology.master, config.topology.node_rank, os.environ)
    except ValueError as error:
        raise UserError(
            str(error),
            "topology.node_rank=NUMBER and topology.master=HOST[:PORT] say it on the command line",
        ) from None
    if identity is None:
        command = shlex.join(["python", *sys.argv])
        if secret.find(os.environ) is None:
            command = f"{secret.VARIABLE}={secret.fresh()} {command}"
        host = config.topology.master or socket.gethostname()
        raise UserError(
            f"topology {config.shape} needs {nodes} machines, and it is not said which one this is",
            "on each machine, the first one's name or address being the master (here "
            f"{host}):\n"
            + "\n".join(
                f"    machine {node}: {command} topology.master={host} topology.node_rank={node}"
                for node in range(nodes)
            ),
        )
    if not 0 <= identity.node < nodes:
        raise UserError(
            f"this is node {identity.node}, but topology {config.shape} has nodes 0 to {nodes - 1}",
            "start as many nodes as the topology has",
        )
    return identity


def secret_of(config: Config) -> Secret | None:
    """What the nodes of this job prove themselves by; None for a job of one node.

    Raises:
        UserError: there is none, or it can be guessed.
    """
    if config.topology.nodes == 1:
        return None
    found = secret.find(os.environ)
    if found is None:
        raise secret.missing(config.topology.nodes)
    if found.open:
        _log.warning(
            "%s=%s: anybody who reaches node 0's port may take part in this job",
            secret.VARIABLE,
            secret.WITHOUT,
        )
    return found


@dataclass
class Job:
    """One run as this node sees it."""

    config: Config
    run_folder: telemetry.RunFolder
    identity: NodeIdentity
    watch: Watch
    secret: Secret | None = None  # of a job of several nodes
    settings: Sequence[str] = ()
    started: float = field(default_factory=time.monotonic)
    address: str = "127.0.0.1"
    hosts: list[str] = field(default_factory=list)
    holding: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # on the run folder
    _claimed: bool = False
    _overdue: Failure | None = None  # what the only rank, in this process, is stuck in
    _not_saved: Failure | None = None  # what kept an interrupted run from its checkpoint
    # Optimizer steps: before the first that was seen, and the most that were seen.
    _steps: Callable[[], tuple[int, int] | None] = lambda: None
    _coordinator: Coordinator | None = None
    _new: bool = False  # the run folder has its configuration from this run alone
    _begun: bool = False  # ranks have been started
    _earlier: int | None = None  # when the result was written that was there before

    def __post_init__(self) -> None:
        self._line: Member | Alone = Alone(self.config.restarts)
        self._earlier = self._result_time()

    def run(self) -> int:
        """Run to the end, and tell a person how it went; the exit status."""
        try:
            with self.line():
                self.run_until_done()
        except Interrupted as interrupt:
            return self.interrupted(interrupt)
        except JobFailed as failed:
            return self.failed(failed.failure)
        except (UserError, OSError, RuntimeError) as error:
            mistake = error if isinstance(error, UserError) else worker.told_shortage(error)
            if mistake is None:
                raise
            if not self._begun:
                self._leave_nothing()
                raise mistake from error  # refused
            return self.failed(self._own_failure(mistake))
        return self._completed()

    @contextlib.contextmanager
    def line(self) -> Iterator[None]:
        """Hold the line to the other nodes; on node 0, serve the others as well."""
        if self.secret is None:
            yield
            return
        silence = self.config.deadlines.silence
        nodes, port = self.config.topology.nodes, self.identity.port or DEFAULT_PORT
        coordinator = None
        if self.identity.node == 0:
            coordinator = Coordinator(
                *(nodes, port, silence, self.secret, self.config.restarts),
                network.address_to_listen_on(self.identity.master),
            )
            coordinator.start()
            self._coordinator = coordinator
        member = self._line = Member(self.identity.node, nodes, silence, self.secret)
        try:
            self._connect(member)
            yield
        finally:
            member.close()
            if coordinator is not None:
                coordinator.stop()

    def run_until_done(self) -> None:
        """Attempt the task, and again after failures as long as restarts are left.

        Raises:
            JobFailed: for good.
        """
        for attempt in range(self.config.restarts + 1):
            try:
                self._attempt(attempt)
                return
            except JobFailed as failed:
                left = self.config.restarts - attempt
                lost = failed.failure["type"] == "NoContact" and self.identity.node != 0
                if left == 0 or not (failed.again or lost):
                    raise
                report_failure(failed.failure, self.identity.node)
                _log.warning("starting again from the last checkpoint, %d restarts left", left - 1)
                self.config.resume = earlier_run.goes_on_from(self.config.resume, self.run_folder)
                if isinstance(self._line, Member):
                    if lost:
                        self._connect(self._line)
                    self._line.expect_another_attempt()

    def interrupted(self, interrupt: Interrupted) -> int:
        """Tell a person what was kept and what was lost, leave the result, and give the exit
        status."""
        if self._result_time() != self._earlier and self._ended_as("completed"):
            return self._completed()  # before the signal could mean anything
        return self._end_interrupted(f"interrupted by {interrupt}", interrupt.number)

    def _end_interrupted(self, how: str, number: int) -> int:
        self.watch.stand_by()
        results = f"; results: {mounts.on_the_host(self.run_folder.path)}"
        print(f"{how}{results if self.identity.node == 0 else ''}", flush=True)
        if self._not_saved is not None:  # whoever starts it again would lose the same again
            return self.failed(self._not_saved)
        failure = self._leave_last_result("interrupted", self._loss())
        if failure is not None:
            report_failure(failure, self.identity.node)
        begun = interruption.last_saved(self.run_folder) is not None
        # Without a checkpoint of its own it goes on from the other run's, which its folder names.
        begun |= self.config.resume not in (None, "auto") and self.run_folder.config.exists()
        if self.config.task.name == "train" and begun:
            command = interruption.command_to_go_on(self.settings, self.run_folder.path)
            print(f"to go on: {command}", flush=True)
        return ending.status_of(number)

    def failed(self, failure: Failure) -> int:
        """Tell a person, leave the result, and give the exit status."""
        number = ending.number_of(failure["type"])
        if number is not None:  # a signal to another node
            return self._end_interrupted(f"interrupted: {failure['message']}", number)
        self.watch.stand_by()
        told = self._leave_last_result("failed", failure)
        report_failure(told or failure, self.identity.node)
        refused = failure["fatal"] and not self._begun
        return ending.REFUSED if refused else ending.FAILED

    def last_words(self) -> None:
        """Leave the result before an end by force: the main thread cannot."""
        status = "interrupted" if self._overdue is None else "failed"
        failure = self._overdue or self._not_saved or self._loss()
        failure = self._leave_last_result(status, failure)
        if failure is not None:
            report_failure(failure, self.identity.node)

    def _leave_last_result(self, status: str, failure: Failure | None) -> Failure | None:
        """Leave the result of a run that did not complete; what is to be told of it: the failure,
        and that the result could not be written, where it could not."""
        try:
            self._leave_result(status, failure)
        except UserError as error:  # one message, and the first cause in it
            if failure is None:
                return self._own_failure(error)
            also = f"{failure['message']}; nor could {self.run_folder.result.name} be written"
            return failure | {"message": also}
        return failure

    def _completed(self) -> int:
        if self.identity.node != 0:
            print(f"[node{self.identity.node}] completed; the results are on node 0", flush=True)
        else:
            worker.show_end(self.config, self.run_folder)
        return ending.COMPLETED

    def _loss(self) -> Failure | None:
        """What an interruption has lost, as a failure."""
        trains = self.config.task.name == "train" and self.identity.node == 0
        steps = self._steps()
        if not trains or steps is None:
            return None
        lost = interruption.loss(self.config, *steps, interruption.last_saved(self.run_folder))
        return self._own_failure(lost, "NotSaved") if lost is not None else None

    def _own_failure(self, error: UserError, kind: str | None = None) -> Failure:
        return node_failure(
            self.identity.node,
            kind or type(error).__name__,
            error.message,
            error.remedy,
            fatal=not error.may_pass,
        )

    def _result_time(self) -> int | None:
        try:
            return self.run_folder.result.stat().st_mtime_ns
        except OSError:
            return None

    def _ended_as(self, status: str) -> bool:
        try:
            return telemetry.read_result(self.run_folder).status == status
        except UserError:
            return False

    def _connect(self, member: Member) -> None:
        host, port = self.identity.master, self.identity.port or DEFAULT_PORT
        deadline, nodes = self.config.deadlines.start, self.config.topology.nodes
        whom = "node 0" if self.identity.node else "node 1" if nodes == 2 else "the other nodes"
        _log.info(
            "waiting for %s at %s:%d, %.0f s at most (deadlines.start)", whom, host, port, deadline
        )
        if self._coordinator is not None:
            # Its own service, whatever the name that others know it by resolves to here: such a
            # name may become known only while a cluster starts.
            try:
                self.address = network.own_address(host, port)
            except UserError as error:
                _log.warning("%s; waiting for the other nodes all the same", error.message)
            member.connect(self._coordinator.listens_at, port, deadline)
        else:
            self.address = member.connect(host, port, deadline)
            if nodes > 2:
                _log.info("node 0 is there; waiting for the other nodes of %d", nodes)

    def _attempt(self, attempt: int) -> None:
        """Meet, check, run.

        Raises:
            JobFailed: on some node, this one included.
        """
        several = self.config.topology.nodes > 1
        try:
            self._meet(attempt)
            self._preflight()
            if self.config.task.name == "preflight":
                return
            if self.config.task.name == "prepare":
                prepare_dataset(self.config, self._begin)
                self._leave_result("completed")
                return
            prepare(self.config)
            # One node may download for longer than the ranks of another would wait for it.
            self._line.exchange("the data", True, self.config.deadlines.prepare)
            self._begun = True
            if self.config.shape.world_size == 1:
                with launcher_environment.cleared(os.environ):
                    self._run_here()
            else:
                self._run_ranks()
            self._line.exchange("end of the run", True, _ENDED_SECONDS)
        except UserError as error:
            if not several and attempt == 0 and not error.may_pass:
                raise
            raise self._line.report(self._own_failure(error)) from error
        except Interrupted as interrupt:
            self._line.tell(
                node_failure(
                    self.identity.node,
                    str(interrupt),
                    f"node {self.identity.node} was asked to end by {interrupt}",
                    "",
                    fatal=True,
                )
            )
            raise

    def _begin(self) -> None:
        self._begun = True

    def _meet(self, attempt: int) -> None:
        """Let all nodes arrive, and agree on one run folder."""
        start = self.config.deadlines.start
        own = Arrival(self.run_folder.path.name, socket.gethostname())
        arrived = of_all(self._line.exchange(MEET, own.value(), start), Arrival.received)
        self.hosts = [each.host for each in arrived]
        if self._coordinator is not None and self._coordinator.address is not None:
            self.address = self._coordinator.address  # the one that others know to lead here
        agreed = self.run_folder.path.with_name(arrived[0].run)
        if agreed != self.run_folder.path:
            with contextlib.suppress(OSError):
                self.run_folder.path.rmdir()  # Hydra made it, and it is empty
            self.run_folder = telemetry.RunFolder(agreed)
            self._earlier = self._result_time()
        if attempt == 0 and self.identity.node == 0:
            check_checkpoint(self.config)
            worker.refuse_used(self.config, self.run_folder)
            self._claim()
            self._new = not self.run_folder.config.exists()
            begin(self.config, self.run_folder)
        self.run_folder.logs.mkdir(parents=True, exist_ok=True)

    def _claim(self) -> None:
        """Hold the run folder from here on.

        Raises:
            UserError: another run does.
        """
        self.holding.enter_context(claim.held(self.run_folder.path))
        self._claimed = True

    def _preflight(self) -> None:
        """Compare the nodes' facts, where there is something to compare or it is asked for."""
        asked = self.config.task.name == "preflight"
        if not asked and (self.config.topology.nodes == 1 or not self.config.preflight):
            return
        node = self.identity.node
        wait = self.config.deadlines.start + preflight.MARGIN
        with preflight.listening(node) as port:
            own = preflight.gather(self.config, self.run_folder, node, self.address, port)
            facts = of_all(self._line.exchange("preflight", own, wait), facts_received)
            seen = preflight.look(facts, node)
            views = of_all(self._line.exchange("preflight ports", seen, wait), view_received)
        findings = preflight.compare(facts, views, self.config)
        if node == 0:
            preflight.show(findings, facts, self.run_folder, whole=asked)
        preflight.refuse_errors(findings)
        if asked and node == 0:
            self._leave_result("completed")

    def _run_here(self) -> None:
        """Run the only rank in this process, where a debugger can follow it.

        Raises:
            JobFailed: the task failed, or is stuck.
            Interrupted: by a signal, after the step and its checkpoint if these take a few seconds.
        """
        place = Place(rank=0, world_size=1, local_rank=0, node=0)
        display: StepDisplay = TerminalDisplay() if sys.stdout.isatty() else NoDisplay()
        own, halts = OwnPulse(), Halts()
        self._steps = own.steps
        seconds = ending.saving_seconds(self.config.deadlines.grace)
        try:
            with (
                self.watch.deadline(lambda: self._is_stuck(own, halts, place)),
                self.watch.asking(own.ask, seconds, "ending after this step and its checkpoint"),
            ):
                worker.execute(self.config, self.run_folder.path, place, display, own)
        except (Exception, Overdue) as error:
            self.watch.stand_by()
            if (interrupt := ending.interrupt_behind(error)) is not None:
                raise interrupt from error  # what came of leaving by it
            failure = self._overdue or worker.describe(error, place)
            self._overdue = None
            self._log_failure(place, worker.as_logged(failure))
            if self.watch.asked is not None:
                self._not_saved = failure
                raise Interrupted(self.watch.asked) from error
            raise JobFailed(failure, again=not failure["fatal"]) from error
        finally:
            display.stop()

    def _is_stuck(self, own: OwnPulse, halts: Halts, place: Place) -> bool:
        """Whether the rank in this process has not moved on in time; called in another thread."""
        halts.look()
        mark = own.last()
        if mark is None or not pulse.is_overdue(mark, self.config.deadlines, halts):
            return False
        main = sys._current_frames()[threading.main_thread().ident or 0]
        self._log_failure(place, "".join(traceback.format_stack(main)).splitlines())
        self._overdue = node_failure(
            place.node,
            "RankStuck",
            f"rank {place.rank} has been {mark.phase.words} for {mark.age:.0f} s",
            f"the end of {self._rank_log(place)} says where: a slow disk or network file system is "
            "the usual reason; deadlines.step=… waits longer",
        ) | {"rank": place.rank}
        return True

    def _rank_log(self, place: Place) -> Path:
        return self.run_folder.logs / f"rank-{place.rank}.log"

    def _log_failure(self, place: Place, lines: list[str]) -> None:
        with contextlib.suppress(OSError), self._rank_log(place).open("a") as log:
            log.writelines(f"{place.tag} {line}\n" for line in lines)

    def _run_ranks(self) -> None:
        """Start this node's ranks and follow them to their end.

        Raises:
            JobFailed: ranks failed, here or elsewhere.
        """
        meeting = Meeting(environment=network.environment(self.config, None, os.environ))
        if self.config.topology.nodes > 1:
            own = Offer(self.address, network.free_port()).value()
            given = self._line.exchange("start of the ranks", own, self.config.deadlines.start)
            first = of_all(given, Offer.received)[0]
            meeting = Meeting(
                self.identity.node,
                self.address,
                f"{first.address}:{first.port}",
                network.environment(self.config, self.address, os.environ),
            )
        meeting.environment[telemetry.HOSTS_VARIABLE] = ",".join(self.hosts)
        meeting.environment[telemetry.COMMAND_VARIABLE] = shlex.join(sys.argv[1:])
        with Ranks(self.config, self.run_folder, meeting) as ranks:
            asked = suspected = False

            def look_around() -> bool:
                nonlocal asked, suspected
                asked |= self._line.check()
                if asked and not suspected and ranks.suspect is not None:
                    suspected = True
                    self._line.tell(ranks.suspect)
                if self._line.stop_step is not None:
                    ranks.ask_to_stop(self._line.stop_step)
                return asked

            self._steps = ranks.steps
            silence = self.config.deadlines.silence
            try:
                failure = ranks.follow(look_around)
            except JobFailed as failed:
                if ending.number_of(failed.failure["type"]) and self._line.stop_step is not None:
                    ranks.let_save()  # the other node need not wait for this one's disk
                    self._not_saved = ranks.failure_while_stopping()
                told = halted.blame(failed.failure, self.identity.node, ranks.halted, silence)
                raise JobFailed(told, again=failed.again) from None
            except Interrupted:
                ranks.stop(self._line.stop_all)
                self._not_saved = ranks.failure_while_stopping()
                raise
            if failure is not None:
                failure = halted.blame(failure, self.identity.node, ranks.halted, silence)
                raise self._line.report(failure)

    def _leave_nothing(self) -> None:
        """Take back what a run that was refused before it began has written into a new folder."""
        if self._new:
            with contextlib.suppress(OSError):  # logs of nodes that share the folder stay
                self.run_folder.config.unlink()
                self.run_folder.logs.rmdir()

    def _leave_result(self, status: str, failure: Failure | None = None) -> None:
        """Write ``result.json``, unless a run that was to be continued has its own there, or
        another run, or node 0 of this one, holds the folder, or the folder was removed."""
        if self.run_folder.result.exists() or not self.run_folder.path.exists():
            return
        if not self._claimed:
            try:
                self._claim()
            except claim.Claimed:
                return
        final = best = None
        with contextlib.suppress(UserError):  # what is wrong there is the failure's to tell
            final, best = telemetry.scores_so_far(self.run_folder)
        telemetry.Result.untrained(
            self.config.shape,
            time.monotonic() - self.started,
            status,
            final=final,
            best=best,
            error=failure and worker.error_of(failure),
        ).write(self.run_folder)


def check_checkpoint(config: Config) -> None:
    """See that a checkpoint that is named exists, before anything is started to read it.

    Raises:
        UserError: it does not; with what there is.
    """
    for name in (config.resume, config.checkpoint):
        if name not in (None, "auto"):
            checkpoint.existing(name)


def begin(config: Config, run_folder: telemetry.RunFolder) -> None:
    """Leave ``config.yaml`` in a new run folder, which this run has claimed.

    A run that is to be continued is not touched: rank 0 replaces its files once it has accepted
    the checkpoint. One that has no checkpoint yet, and was to continue another run's, still does.

    Raises:
        UserError: the checkpoint that it continues is gone, or the folder holds a run already and
            ``resume=auto`` does not continue it.
    """
    worker.refuse_used(config, run_folder)  # another may have come and gone until it was claimed
    if config.resume == "auto":
        config.resume = earlier_run.goes_on_from(config.resume, run_folder)
        check_checkpoint(config)
    if not run_folder.metrics.exists():
        telemetry.write_text(run_folder.config, dump(config))


def prepare(config: Config) -> None:
    """Download what the ranks will read, once, before there are any."""
    data.prepare(config.dataset, _log.info)
    models.fetch_pretrained(config.model)


def prepare_dataset(config: Config, begun: Callable[[], None]) -> None:
    """Run ``task=prepare``, in this process and without Paddle.

    Args:
        begun: called when nothing is left to be refused.

    Raises:
        UserError: with the file and the remedy; what is done stays done.
    """
    from recipes.data.preparation import prepare_or_verify

    unit = "MiB" if config.prepare.verify else "image"
    display: StepDisplay = TerminalDisplay(unit) if sys.stdout.isatty() else NoDisplay()
    try:
        prepare_or_verify(config, TellingDisplay(display, begun), _log.info)
    except Interrupted:
        if not config.prepare.verify:
            _log.info("what is prepared stays: the same command goes on where this one ended")
        raise


def report_failure(failure: Failure, here: int) -> None:
    """One message: what happened, where, and what to do; the one rank's traceback if it helps.

    Args:
        here: the node that prints it, which need not be the one that has failed.
    """
    if failure["traceback"]:
        print(printable_lines(failure["traceback"].rstrip()), file=sys.stderr)
    rank = "" if failure["rank"] is None else f" rank{failure['rank']}"
    where, tag = "", f"[node{here}{rank}]"
    if failure["node"] != here:
        tag = f"[node{here}]"
        named = f"node {failure['node']}"
        if not failure["message"].startswith(named):
            where = f"on {named}, rank {failure['rank']}: " if rank else f"on {named}: "
    unexpected = failure["traceback"] is not None and failure["rank"] is not None
    name = f"{failure['type']}: " if unexpected else ""
    message = printable_lines(failure["message"])
    print(f"{tag} error: {where}{name}{message}", file=sys.stderr)
    if failure["remedy"]:
        print(f"  remedy: {printable_lines(failure['remedy'])}", file=sys.stderr, flush=True)
