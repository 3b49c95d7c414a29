"""The HTTP layer: connections, bodies, answers, streams, and errors as clients see them."""
