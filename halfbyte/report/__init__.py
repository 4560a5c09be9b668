"""A run's folder as one HTML file that can be read anywhere: `write_report("runs/first")`."""

from halfbyte.report.write import watch, write_report

__all__ = ["watch", "write_report"]
