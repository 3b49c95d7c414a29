"""L2: what fills it, loads from it and empties it, the controller of the copies."""
