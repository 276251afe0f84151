"""Plants the fault named by PLANTED_FAULT in this process, and all that it forks, once `wanref.pipeline` is there."""

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType


class _Finder:
    """Lets the module be found and run as ever, and plants afterwards."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "wanref.pipeline":
            return None
        sys.meta_path.remove(_Finder)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_plant(module: ModuleType) -> None:
            run(module)
            # The catalogue imports this module, too, which is whole by now.
            sys.modules[name] = module
            from oracle.faults.catalogue import FAULTS
            from oracle.faults.plant import watching

            (fault,) = (each for each in FAULTS if each.id == os.environ["PLANTED_FAULT"])
            for planted in (watching(), fault.plant()):
                planted.__enter__()
                PLANTED.append(planted)  # a generator that nobody keeps is closed, and takes its fault out again

        spec.loader.exec_module = run_and_plant  # type: ignore[method-assign]
        return spec


PLANTED: list[object] = []
if "PLANTED_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder)
