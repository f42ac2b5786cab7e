"""Code that runs, and may die, in a child of the test: forked, or a new interpreter."""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable

__all__ = ["in_child", "in_interpreter"]


def in_child(body: Callable[[], object], timeout_s: float = 20) -> tuple[int, str]:
    """Run `body` in a forked child.

    Returns
    -------
    int, str
        The exit code (0: it returned; 1: it raised; -n: signal n killed it), and what it returned or raised, as text.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        _run(body, sink)
    os.close(sink)
    text, ended = b"", False
    while not ended and select.select([source], [], [], timeout_s)[0]:
        part = os.read(source, 1 << 16)
        text, ended = text + part, not part
    os.close(source)
    if not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.decode()


def _run(body: Callable[[], object], sink: int) -> None:
    code = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(sink, str(body()).encode())
        code = 0
    except BaseException:
        os.write(sink, traceback.format_exc().encode())
    finally:
        os._exit(code)


def in_interpreter(code: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds what this one finds.

    Raises
    ------
    TimeoutExpired
        It did not end; it was killed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
