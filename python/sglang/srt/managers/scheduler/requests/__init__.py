"""One request, and where it is between its arrival and its end."""
