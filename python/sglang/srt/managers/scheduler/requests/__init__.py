"""One request, and its state between its arrival and its end."""
