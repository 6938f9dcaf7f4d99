"""Keeps the ranks of a run from waiting for one that failed or is gone.

A collective call whose partner is gone may hang until the process group's timeout, and that must be long: ranks wait
for each other's rollouts. So every rank adds to a counter of its own, once a second, in the key-value store through
which the ranks found each other (the launcher of the first node serves it), and reads those of the others.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import DistError, TCPStore

POLL_S = 1.0
START_S = 600.0  # for every rank to come: packages on a cold network file system take minutes to import
BLAME_S = 6.0  # of silence show which rank is to blame for a collective call that has failed already

FAILURES, REASON, BEAT, PLACE, TOLD = (f"sapo/watch/{key}" for key in ("failures", "reason", "beat", "place", "told"))
AGAIN = "To go on from the last checkpoint start every node again, with the same command and --resume."


class Watch:
    """Ends this process, with one message a node, when another rank of the run failed or gives no sign of life.

    A context manager around a whole run, from before the process group is joined. It knows the run's ranks from the
    variables that a launcher sets, and does nothing in a run of one process.

    silence_s: seconds without a sign of life after which a rank is lost. on_end: called with the reason before this
    process ends because of another. It is ended, with exit status 1, from a thread: the main one may hang in a
    collective call for ever.
    """

    def __init__(self, silence_s: float = 120.0) -> None:
        self.silence_s = silence_s
        self.on_end: Callable[[str], None] = lambda reason: None
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self._host = socket.gethostname()
        self._node = os.environ.get("GROUP_RANK", self._host)
        self._address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._store: TCPStore  # set before _joined is
        self._joined, self._stop = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=body, daemon=True) for body in (self._listen, self._judge)]
        self._failing = False  # this rank is being ended by its main thread
        self._gone = False  # the store has ended
        self._failures = 0  # told to the store so far, by all ranks
        self._polls = 0
        self._unanswered_s = 0.0  # since the store was last read
        self._beats = [0] * self.world_size
        self._silent_s = [0.0] * self.world_size

    def __enter__(self) -> Watch:
        if self.world_size > 1:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5 * POLL_S)  # a thread in a call to the store aborts an interpreter that shuts down

    def fail(self, error: BaseException) -> bool:
        """Tell the other ranks that this one ends by an error; return whether it has to print it: one rank a node does.

        The error of a collective call is mostly another rank's fault: that one is looked for and printed instead.
        """
        self._failing = True
        if self.world_size == 1 or not self._joined.wait(10 * POLL_S):
            return True
        cause = None
        patience = time.monotonic() + 2 * BLAME_S if _of_a_collective_call(error) else 0.0
        while cause is None and time.monotonic() < patience:
            time.sleep(POLL_S / 4)
            cause = self._cause(BLAME_S)
        if cause:
            self._tell(cause)
            self._publish(cause)
            return False
        first = self._is_first_of_node()
        text = str(error) if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
        self._publish(f"{self._name([self.rank])} failed: {text.strip()}")
        return first

    def _listen(self) -> None:
        """Give this rank's signs of life and read those of the others."""
        try:
            address, port = self._address.rsplit(":", 1)
            self._store = TCPStore(address, int(port), timeout=timedelta(seconds=START_S), wait_for_workers=False)
            beats = [f"{BEAT}/{rank}" for rank in range(self.world_size)]
            self._store.set(f"{PLACE}/{self.rank}", f"node {self._node}, host {self._host}")
            for key in (FAILURES, *beats):
                self._store.add(key, 0)  # a key that is missing would be waited for
            self._joined.set()
            before = time.monotonic()
            while not self._stop.wait(POLL_S):
                self._store.add(beats[self.rank], 1)
                failures, *counts = map(int, self._store.multi_get([FAILURES, *beats]))
                # a process that was itself kept from running has not heard the others either
                passed, before = min(time.monotonic() - before, 2 * POLL_S), time.monotonic()
                for rank, count in enumerate(counts):
                    self._silent_s[rank] = 0.0 if count != self._beats[rank] else self._silent_s[rank] + passed
                self._beats, self._failures, self._polls = counts, failures, self._polls + 1
        except DistError:
            self._gone = True

    def _judge(self) -> None:
        """End this process when there is cause to. A thread of its own: a call to a frozen store does not return."""
        polls = -1
        while not self._stop.wait(POLL_S / 4):
            self._unanswered_s = 0.0 if polls != self._polls else self._unanswered_s + POLL_S / 4
            polls = self._polls
            cause = None if self._failing else self._cause(self.silence_s)
            if cause is not None:
                self._tell(cause)
                self._publish(cause)
                sys.stdout.flush()
                os._exit(1)

    def _cause(self, silence_s: float) -> str | None:
        """Return why the run cannot go on, None as long as nothing is known."""
        with self._unless_gone():
            if self._failures:
                return self._store.get(REASON).decode()
            silent = enumerate(zip(self._silent_s, self._beats))
            lost = [rank for rank, (passed_s, beats) in silent if passed_s > (silence_s if beats else START_S)]
            if lost:
                return (
                    f"{self._name(lost)}: no sign of life for {self._silent_s[lost[0]]:.0f} s; killed (out of memory?) "
                    "or its machine or network is gone. See what was printed there"
                )
        if self._joined.is_set() and self._unanswered_s > silence_s:
            self._gone = True
        if self._gone:
            return (
                f"the launcher of the first node, or its machine, is gone: {self._address} does not answer. See what "
                "was printed there"
            )
        return None

    @contextlib.contextmanager
    def _unless_gone(self) -> Iterator[None]:
        """Run a block that calls the store, which may turn out to be gone."""
        try:
            yield
        except DistError:
            self._gone = True

    def _tell(self, cause: str) -> None:
        """Print, on one rank of the node, why the run ends."""
        if self._is_first_of_node():
            print(f"error: {cause}. {AGAIN}", file=sys.stderr, flush=True)
        self.on_end(cause)

    def _is_first_of_node(self) -> bool:
        """Return whether no other rank of this node has asked before."""
        if not self._gone:
            with self._unless_gone():
                return self._store.add(f"{TOLD}/{self._node}", 1) == 1
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def _publish(self, reason: str) -> None:
        """Let all ranks know; the first reason counts. Wait until they do: with this process the store may end."""
        if not self._gone:
            with self._unless_gone():
                self._store.compare_set(REASON, "", reason)
                self._store.add(FAILURES, 1)
                time.sleep(2 * POLL_S)

    def _name(self, ranks: list[int]) -> str:
        """Return ranks with their nodes: "rank 1 (node 1, host b)"."""
        by_place: dict[str, list[str]] = {}
        for rank in ranks:
            key = f"{PLACE}/{rank}"
            place = self._store.get(key).decode() if self._store.check([key]) else "not started"
            by_place.setdefault(place, []).append(str(rank))
        return ", ".join(f"rank {' '.join(names)} ({place})" for place, names in by_place.items())


def _of_a_collective_call(error: BaseException) -> bool:
    """Return whether torch.distributed raised this error; gloo's are plain RuntimeErrors."""
    return isinstance(error, DistError) or (type(error) is RuntimeError and bool(re.search("gloo|NCCL", str(error))))
