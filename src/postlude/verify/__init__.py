"""Proof that a layout computes what one rank computes. Start at `compare.py`."""

from postlude.verify.cases import GRID, OBJECTIVES, Case, fitting, source_of
from postlude.verify.compare import TOLERANCES, Report, compare, compare_all

__all__ = ["GRID", "OBJECTIVES", "TOLERANCES", "Case", "Report", "compare", "compare_all", "fitting", "source_of"]
