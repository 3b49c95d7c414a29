"""HTTP itself: connections, bodies, answers and streams, errors as clients see them."""
