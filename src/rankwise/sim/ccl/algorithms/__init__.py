"""The algorithms that ship, under the names that configurations know them by.

They are data, and live in `rankwise.core.collectives.algorithms`; what has a kernel, too, is here.
"""

from rankwise.core.collectives import algorithms

__path__ = [*__path__, *algorithms.__path__]
"""`import_module` finds the modules of that package under this one's name as well."""
