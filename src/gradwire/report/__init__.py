"""The report of a comparison: one HTML file that needs nothing else."""

from gradwire.report.page import write_report

__all__ = ["write_report"]
