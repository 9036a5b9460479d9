"""The report: one self-contained HTML file, and PNGs beside it, from any directories that the commands leave."""

from tad.evaluation.report.page import Report, write_report
from tad.evaluation.report.replay import Live

__all__ = ["Live", "Report", "write_report"]
