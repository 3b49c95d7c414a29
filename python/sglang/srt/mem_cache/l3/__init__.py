"""L3: the connection to a store, reads, writes, checks, and changes at run time."""
