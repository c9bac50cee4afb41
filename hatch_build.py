"""Compiles the kernels of the search into the wheel, so that planning needs neither numba nor seconds to compile.

Where there is no C compiler to link them the wheel is made without, for every platform.
"""

import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernels(BuildHookInterface):
    """Adds ``steelyard/search/compiled_kernels`` to a wheel, and its platform to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; an editable one runs on its sources."""
        if version == "editable":
            return
        folder = Path(tempfile.mkdtemp())
        try:
            compile_kernels(Path(self.root) / "src" / "steelyard" / "search" / "kernels.py", folder)
        except Exception as error:  # whatever a compiler lacks
            self.app.display_warning(f"the kernels of the search are not compiled: {error}")
            return
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["force_include"] |= {str(each): f"steelyard/search/{each.name}" for each in folder.iterdir()}


def compile_kernels(source: Path, folder: Path) -> None:
    """Writes the extension module ``compiled_kernels`` with every kernel of a file into a folder."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba means to replace pycc and has nothing yet
        from numba.pycc import CC

        spec = spec_from_file_location("kernels", source)
        assert spec is not None
        assert spec.loader is not None
        kernels = module_from_spec(spec)
        spec.loader.exec_module(kernels)
        library = CC("compiled_kernels")
        library.output_dir = str(folder)
        for name, signature in kernels.SIGNATURES.items():
            library.export(name, signature)(getattr(kernels, name).py_func)
        library.compile()
