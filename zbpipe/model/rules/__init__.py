"""Weight-gradient rules: what I hands on, what it records, and what W later adds to `.grad`.

`deferred.py` holds what I leaves for W, `accumulate.py` how W adds; one file a kind of module has
its rule; `choose.py` says which module has which rule.
"""

from .batched import Batched
from .conv import Conv
from .deferred import Deferred, Record
from .embedding import Embedding
from .linear import Linear
from .norm import Norm
from .products import Grouped, Product, Shift

__all__ = ["SPLIT_FUNCTIONS", "Deferred", "Record"]

# The autograd Functions that take a parameter and record its gradient instead of returning it.
SPLIT_FUNCTIONS = (Linear, Embedding, Conv, Norm, Product, Batched, Grouped, Shift)
