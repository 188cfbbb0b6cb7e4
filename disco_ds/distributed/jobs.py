"""Jobs: long work, such as writing files, that every rank does in a thread. The main threads wait for all ranks' jobs.

A collective times out if one rank reaches it much later than the others. Therefore the main threads do not
do the work themselves, but call a short collective every few seconds until every job is done.
"""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from disco_ds.distributed import comm

TURN_S = 2.0
"""Maximum time that a rank waits for its job before the next collective. It is far below the collectives' timeout."""
LOG_EVERY_S = 60.0
Result = TypeVar("Result")


def start(work: Callable[[], Result]) -> Future[Result]:
    """Call `work` in a daemon thread. If `work` raises an error, the future's result() raises it again."""
    job: Future[Result] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, name="job", daemon=True).start()
    return job


def wait_for_all(job: Future[Result], what: str) -> None:
    """Wait until the jobs of all ranks are done, however long that takes. Collective.

    Args:
        job: This rank's job.
        what: Name of the job in the log.
    """
    begin = logged = time.monotonic()
    while True:
        futures.wait([job], TURN_S)
        running = comm.ranks_where(not job.done())
        if not running:
            return
        now = time.monotonic()
        if now - logged >= LOG_EVERY_S:
            logged = now
            comm.warn(
                f"{what}: still waiting for {comm.join_ranks(running)} after {now - begin:.0f} s"
            )


def run(
    what: str, work: Callable[[], Result], agreed: type[Exception] = comm.AgreedError
) -> Result:
    """Call `work`, which may take long and must not communicate, on every rank. Collective.

    Args:
        what: Name of the job in the log. Error messages start with it.
        work: The function to call.
        agreed: Type of the error that all ranks raise.

    Raises:
        AgreedError: On every rank, if `work` fails on any rank. If `agreed` is given, it replaces this type.
    """
    job = start(work)
    wait_for_all(job, what)
    with comm.all_or_none(what, agreed):
        result = job.result()
    return result
