"""anyformer: one Transformer made of parts.

Every public name is listed in `__init__.pyi`, and imported when it is first used, so that `import anyformer` is quick.
"""

from importlib.metadata import version

import lazy_loader

__version__ = version("anyformer")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
