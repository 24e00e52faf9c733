"""How a process imports what it keeps."""

import gc
import importlib


def import_for_good(*modules: str) -> None:
    """Import the modules. The garbage collector does not run meanwhile, and never looks at what they bring."""
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()
