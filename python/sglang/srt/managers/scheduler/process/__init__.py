"""The process of a rank: what is built in it, its loop, its sockets, what ends it."""
