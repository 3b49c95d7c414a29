"""Views of operators in tests: alerts on what servers export, and faults that they should name."""
