"""Proof that a layout computes what one rank computes. Start at `compare.py`."""

from postlude.verify.cases import GRID, OBJECTIVES, Case
from postlude.verify.compare import TOLERANCE, Report, compare

__all__ = ["GRID", "OBJECTIVES", "TOLERANCE", "Case", "Report", "compare"]
