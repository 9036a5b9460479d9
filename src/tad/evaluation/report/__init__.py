"""The report: one self-contained HTML file, and PNGs beside it, from any directories that the commands leave."""

from tad.evaluation.report.write import Report, write_report

__all__ = ["Report", "write_report"]
