"""The processes of `scripts/steps`: one for each contender, which waits until it is asked.

What a contender compiles, enables and allocates stays in its process. A process ends when it is no
longer asked.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from step_contenders import Task, Trainee

_SECONDS_TO_END = 5.0
_CONTEXT = multiprocessing.get_context("spawn")  # PyTorch's threads and GPUs do not survive a fork


class WorkerError(Exception):
    """A contender failed, or was late."""


class Worker:
    """A contender in its process; it is there once its first `answer` is."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, task))
        self._process.start()
        theirs.close()  # so that the process's end is noticed

    def ask(self, method: str, *arguments: object) -> None:
        """Has the contender's method of this name called; if it has ended, `answer` says so."""
        with suppress(OSError):
            self._connection.send((method, arguments))

    def answer(self, deadline: float) -> Any:
        """What the last call returned, or None if the contender was made; waits for it.

        Raises:
            WorkerError: The contender failed, or did not answer by this time.
        """
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise WorkerError("out of time")
        try:
            failure, found = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise WorkerError(f"its process ended with {self._process.exitcode}") from None
        if failure is not None:
            raise WorkerError(failure)
        return found

    def hang_up(self) -> None:
        """Asks no more, at which the process ends."""
        self._connection.close()

    def end(self, seconds: float = _SECONDS_TO_END) -> None:
        """Ends the process, at the latest after these seconds."""
        self.hang_up()
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Group:
    """Contenders that are compared; one that fails or is late is told, ended and left out."""

    def __init__(self, tasks: Mapping[str, Task], deadline: float) -> None:
        """Starts them.

        Args:
            tasks: By the contenders' names.
            deadline: When an answer is too late, by `time.monotonic`.
        """
        self._deadline = deadline
        self._workers = {name: Worker(task) for name, task in tasks.items()}
        self.is_whole = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of the contenders that are left."""
        return tuple(self._workers)

    def get_ready(self, deadline: float) -> None:
        """Waits for all until then."""
        self._answers(self.names, deadline)

    def all(self, method: str, *arguments: object) -> dict[str, Any]:
        """What each returns, by its name; all at once."""
        return self._asked(self.names, method, *arguments)

    def one(self, name: str, method: str, *arguments: object) -> Any:
        """What the contender of this name returns; None if it is left out now."""
        return self._asked((name,), method, *arguments).get(name)

    def close(self) -> None:
        """Ends all."""
        for worker in self._workers.values():
            worker.hang_up()
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _asked(self, names: Iterable[str], method: str, *arguments: object) -> dict[str, Any]:
        for name in names:
            self._workers[name].ask(method, *arguments)
        return self._answers(names, self._deadline)

    def _answers(self, names: Iterable[str], deadline: float) -> dict[str, Any]:
        found = {}
        for name in names:
            worker = self._workers[name]
            try:
                found[name] = worker.answer(deadline)
            except WorkerError as error:
                task = worker.task
                print(f"{task.model} {task.precision} {name} is left out: {error}", flush=True)
                self.is_whole = False
                self._workers.pop(name).end(0)
        return found


def _serve(connection: Connection, task: Task) -> None:
    """Makes a contender, then calls its methods, until nobody asks."""
    try:
        trainee = Trainee(task)
        connection.send((None, None))
        while True:
            method, arguments = connection.recv()
            connection.send((None, getattr(trainee, method)(*arguments)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:  # whatever it is, the others go on
        traceback.print_exc(limit=-5, file=sys.stderr)
        text = str(error).strip().partition("\n")[0]
        connection.send((f"{type(error).__name__}: {text}", None))
