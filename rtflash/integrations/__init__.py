"""rtflash inside other packages; each module is imported when it is first asked for."""

_MODULES = ("transformers",)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__}.{name} does not exist; there is {', '.join(_MODULES)}")
