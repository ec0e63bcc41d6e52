def _strandline_boot():
    """Runs inside `import torch`: makes the embedded package importable and waits for the import's end."""
    import ctypes
    import importlib.machinery
    import os
    import sys

    library = ctypes.PyDLL(None)
    library.strandline_python_source.restype = ctypes.c_char_p
    library.strandline_python_source.argtypes = [ctypes.c_char_p]
    library.strandline_say.argtypes = [ctypes.c_char_p]

    class Importer:
        """Finds `strandline` and its modules in the preloaded library; an installed package is not needed."""

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            head, _, module = name.partition(".")
            if head != "strandline" or library.strandline_python_source(module.encode()) is None:
                return None
            spec = importlib.machinery.ModuleSpec(name, cls)
            cls.adopt(spec)
            return spec

        @classmethod
        def adopt(cls, spec):
            """Makes a spec that of a module of the embedded package; returns the module, empty."""
            module = spec.name.partition(".")[2]
            spec.loader, spec.origin = cls, f"<strandline>/{module or '__init__'}.py"
            spec.has_location = True  # gives modules a __file__, as their code and tracebacks expect
            if not module:
                # What only an installed package has (pytest's plugin) is found there.
                installed = importlib.machinery.PathFinder.find_spec(spec.name)
                places = getattr(installed, "submodule_search_locations", None)
                spec.submodule_search_locations = list(places or [])
            return type(sys)(spec.name)

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            name = module.__name__.partition(".")[2]
            code = compile(library.strandline_python_source(name.encode()), module.__spec__.origin, "exec")
            exec(code, module.__dict__)

        @staticmethod
        def get_source(name):
            text = library.strandline_python_source(name.partition(".")[2].encode())
            return None if text is None else text.decode()

    if not any(getattr(finder, "__qualname__", "") == Importer.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Importer)

    def begin():
        try:
            if "torch" in sys.modules:
                from strandline import _boot

                _boot.start(os.environ.get("STRANDLINE_MODE") or "auto")
        except BaseException as error:  # the job's import of torch must not fail because of us
            import traceback

            where = traceback.extract_tb(error.__traceback__)[-1]
            library.strandline_say(
                f"could not start ({type(error).__name__}: {error}, at {where.filename}:{where.lineno}); the job runs without it".encode()
            )

    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    if spec is None:
        return
    if not getattr(spec, "_initializing", False):
        begin()
        return
    plain = type(spec)

    class Watched(plain):
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)
            if name == "_initializing" and not value:
                object.__setattr__(self, "__class__", plain)
                begin()

    spec.__class__ = Watched


try:
    _strandline_boot()
except BaseException as _strandline_error:
    import os as _strandline_os

    _strandline_os.write(
        2, f"strandline: could not start ({_strandline_error!r}); the job runs without it\n".encode()
    )
    del _strandline_os
finally:
    del _strandline_boot
