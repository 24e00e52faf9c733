"""Threads that carry messages leave running threads on their cores; threads that compute do not."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no scheduling classes here")

_SCRIPT = """
import os, threading
from workers.cores import compute_here, give_way

classes = {}
def note(name):
    classes[name] = os.sched_getscheduler(0)
def run(name, work):
    thread = threading.Thread(target=work, args=(name,))
    thread.start()
    thread.join()
def compute(name):
    compute_here()
    note(name)
    run("started by one that computes", note)

waits, goes_on = threading.Event(), threading.Event()
def live(name):
    waits.set()
    goes_on.wait()
    note(name)
early = threading.Thread(target=live, args=("started before",))
early.start()
waits.wait()
give_way()
goes_on.set()
early.join()
note("main")
run("started after", note)
run("computes", compute)
print({name: {os.SCHED_BATCH: "batch", os.SCHED_OTHER: "other"}[policy] for name, policy in classes.items()})
"""


def test_a_process_gives_way_but_for_its_threads_that_compute() -> None:
    ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.strip() == str(
        {
            "started before": "batch",
            "main": "batch",
            "started after": "batch",
            "computes": "other",
            "started by one that computes": "other",
        }
    )
