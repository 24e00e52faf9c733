"""How a process imports what it keeps."""

import gc
import importlib
import os


def leave_removed_folder() -> None:
    """Go to the root folder where this process began in a folder that was removed: the MKL of torch aborts in one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def import_for_good(*modules: str) -> None:
    """Import the modules. The garbage collector does not run meanwhile, and never looks at what they bring."""
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()
