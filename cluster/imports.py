"""How a process imports what it keeps."""

import gc
import importlib
import os
import signal
import threading


def leave_removed_folder() -> None:
    """Go to the root folder where this process began in a folder that was removed: the MKL of torch aborts in one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def let_interrupts_end() -> bool:
    """Let SIGINT end this process without a word where it would raise KeyboardInterrupt; return whether it would have.

    An import leaves callbacks of weak references behind, in which a KeyboardInterrupt only prints itself and is lost.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # as with `nohup` or `&`
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return True


def import_for_good(*modules: str) -> None:
    """Import the modules. The garbage collector does not run meanwhile, and never looks at what they bring.

    Nothing has been begun that would have to end: SIGINT ends the process.
    """
    heard = let_interrupts_end()
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
