"""L2: its books, what fills it, loads from it and empties it, the controller of the copies."""
